"""Many tensors as a few vectors, of which ranks make sums and maxima, and back. Nothing is exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor


def flatten(tensors: Iterable[Tensor], weight: float, device: torch.device) -> dict[torch.dtype, Tensor]:
    """One vector for each kind of number, whose sums over ranks make a mean: weighed, and the weight at its end.

    Integers go without a weight, for a maximum: they count (the batches that a norm has seen), and of counts a mean
    would be one that no rank has come to. Nothing is exchanged.

    Vectors are on ``device``, wherever tensors are: Adam keeps the number of its steps in RAM, and its moments where
    the parameters are.
    """
    flats = {}
    for dtype, group in _by_dtype(tensors).items():
        pieces = moved(group, dtype, device)
        if dtype.is_floating_point:
            flats[dtype] = torch.cat([*pieces, pieces[0].new_ones(1)]).mul_(weight)
        else:
            flats[dtype] = torch.cat(pieces)
    return flats


def op_of(flat: Tensor) -> dist.ReduceOp.RedOpType:
    """What ranks make of a vector of :func:`flatten`."""
    return dist.ReduceOp.SUM if flat.is_floating_point() else dist.ReduceOp.MAX


def write_back(flats: Mapping[torch.dtype, Tensor], tensors: Iterable[Tensor]) -> None:
    """Make means of what :func:`flatten` gave and ranks have reduced. Without weight, floats stay as they are."""
    for dtype, group in _by_dtype(tensors).items():
        flat = flats[dtype]
        if not dtype.is_floating_point:
            scatter_back(flat, group)
        elif (total := float(flat[-1])) > 0:
            scatter_back(flat[:-1].div_(total), group)


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Put the pieces of a vector in the place of tensors, one after the other. Nothing is exchanged."""
    runs = _runs(tensors)
    for run, part in zip(runs, flat.split([_length(run) for run in runs]), strict=True):
        pieces = part.to(run[0].device).split([t.numel() for t in run])  # one copy for all that are elsewhere
        for tensor, piece in zip(run, pieces, strict=True):
            tensor.detach().copy_(piece.view_as(tensor))  # into the old storage: optimizers and compiled graphs hold it


def _runs(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors, where neighbours on one device are together."""
    return [list(run) for _, run in groupby(tensors, key=lambda tensor: tensor.device)]


def moved(tensors: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Vectors of a type on a device that hold the tensors in their order; neighbours on another make one copy."""
    vectors = []
    for run in _runs(tensors):
        pieces = [tensor.detach().reshape(-1).to(dtype) for tensor in run]
        vectors += pieces if run[0].device == device else [torch.cat(pieces).to(device)]
    return vectors


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """The tensors by the type that they are summed in. The order of types is the same on all ranks."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.numel():
            continue
        floating = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        groups.setdefault(floating if tensor.is_floating_point() else torch.int64, []).append(tensor)
    return {
        dtype: sorted(group, key=lambda tensor: tensor.device.type)  # each device's together
        for dtype, group in sorted(groups.items(), key=lambda item: str(item[0]))
    }


def _length(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
