"""Digests of arrays, computed in milliseconds however large the arrays are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_BYTES_OF_WHOLE = 1 << 20  # arrays up to this size are read whole
_ROWS = 64  # read of a larger array: each may be a read from the disk
_SEED = 7


def fingerprint_of(arrays: Iterable[tuple[str, torch.dtype, Sequence[int], Iterable[Tensor]]]) -> str:
    """The hash of ``indptr``, ``indices`` and the masks, each given as name, type, shape and pieces of its content."""
    digest = hashlib.blake2b(digest_size=16)
    for name, dtype, shape, pieces in arrays:
        digest.update(f"{name} {dtype} {tuple(shape)}".encode())
        for piece in pieces:
            digest.update(piece.contiguous().numpy().data)
    return digest.hexdigest()


def sampled_digest(arrays: Mapping[str, Tensor]) -> str:
    """A hash of the names, types and shapes of arrays, and of some rows of those that are not floating point.

    Of an array of more than a megabyte, 64 evenly spread rows are read. So a graph larger than RAM takes no longer than
    another, and a difference in a few rows of a large array is not seen.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        if array.numel() and not _has_fractions(array):
            digest.update(_some_rows(array).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sketches(arrays: Mapping[str, Tensor]) -> tuple[float, float]:
    """Two numbers that tell floating point arrays apart; differences in their last digits hardly change them.

    Another kind of processor computes other last digits from the same seed. Each number is a sum over the arrays: some
    rows of each, added up with random signs and divided by their norm.
    """
    found = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    for _, array in sorted(arrays.items()):
        if array.numel() and _has_fractions(array):
            values = torch.view_as_real(array) if array.is_complex() else array
            values = _some_rows(values).double().nan_to_num().flatten()
            signs = 2 * torch.randint(0, 2, (2, values.numel()), generator=generator) - 1
            found += signs.double() @ values / values.norm().clamp(min=1e-300)
    return float(found[0]), float(found[1])


def _has_fractions(array: Tensor) -> bool:
    return array.is_floating_point() or array.is_complex()


def _some_rows(array: Tensor) -> Tensor:
    if array.nbytes <= _BYTES_OF_WHOLE:
        return array
    return array[torch.linspace(0, len(array) - 1, _ROWS, dtype=torch.float64).long()]
