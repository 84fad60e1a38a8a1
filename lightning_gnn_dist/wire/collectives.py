"""What ranks make of their tensors together. Every byte that is sent is counted.

Functions that exchange are collective: all ranks must call them, in the same order and with tensors of the same shapes.
These are ``average_``, ``sum_``, ``broadcast_`` and all that gather. With one process they return at once and send
nothing. By a ``checksum`` ranks compare what they hold.
"""

from __future__ import annotations

import atexit
import io
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Bytes that this process has sent, and seconds that it has spent in collectives, since it started.

    Bytes are those that leave this rank in the usual algorithms. With P ranks that is 2 (P - 1) / P of the whole in an
    all-reduce, and (P - 1) / P in an all-gather, both by a ring, or in a broadcast, whose copies all ranks share.

    Attributes:
        bytes_sent: All bytes.
        seconds: All seconds.
        boundary_bytes: Of these, the bytes of rows, and of their gradients, that layers exchange at the boundary.
        boundary_seconds: Of these, the seconds in such exchanges.
        bytes_between_hosts: Of all bytes, those to ranks of other hosts, as far as the launcher says who is there.
    """

    bytes_sent: float = 0.0
    seconds: float = 0.0
    boundary_bytes: float = 0.0
    boundary_seconds: float = 0.0
    bytes_between_hosts: float = 0.0
    _begun: Traffic | None = None  # as it was when the fit began

    def begin_fit(self) -> None:
        """Let what is logged count from here on."""
        self._begun = replace(self, _begun=None)

    @property
    def figures(self) -> dict[str, float]:
        """What to log of this fit; nothing of a boundary where nothing was sent."""
        begun = self._begun or Traffic()
        names = ["bytes_sent", "seconds"]
        names += ["boundary_bytes", "boundary_seconds"] if self.boundary_bytes > begun.boundary_bytes else []
        names += ["bytes_between_hosts"] if hosts is not None else []
        return {f"comm/{name}": getattr(self, name) - getattr(begun, name) for name in names}


class Sent(NamedTuple):
    """Bytes that a rank sends, and how many of them to ranks of other hosts."""

    all: float
    between_hosts: float


hosts: Any = None  # :class:`~lightning_gnn_dist.wire.hosts.Hosts` of all ranks, if there are several


traffic = Traffic()
_counting = Lock()


def is_joined() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if is_joined() else 1


def rank() -> int:
    """The number of this process among the ranks, 0 without a process group."""
    return dist.get_rank() if is_joined() else 0


def check_group(size: int, device: torch.device | None = None) -> None:
    """Refuse a fit in a process whose group, of an earlier fit, has another size, or cannot reach its device."""
    if size > 1 and is_joined() and world_size() != size:
        raise RuntimeError(
            f"This process is in a group of {world_size()} rank(s) of an earlier fit, which it keeps until it ends, "
            f"and this fit has {size}: run one of them in another process, or start the ranks of both by "
            'launch=Launch(start_method="fork").'
        )
    if device is not None and device.type == "cpu" and is_joined() and dist.get_backend() == "nccl":
        raise RuntimeError(
            "This process is in a group (nccl) of an earlier fit on GPUs, which it keeps until it "
            "ends, and this fit computes on CPUs: run it in another process."
        )


def leave() -> None:
    """End the process group, whoever made it, before the interpreter ends. Not collective.

    A thread of gloo holds the tensors of a collective for a moment after the collective has returned. If the
    interpreter is gone by then, the process aborts after all its work.
    """
    if is_joined():
        dist.destroy_process_group()


atexit.register(leave)  # Lightning does so for nccl only


def has_backend(name: str) -> bool:
    """Whether this torch has the backend; ``"cpu:gloo,cuda:nccl"`` names several, which it must all have."""
    return all(dist.is_backend_available(part.split(":")[-1]) for part in name.split(","))


@torch.no_grad()
def average_(tensors: Iterable[Tensor], weight: float = 1.0, group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor, in place, by its weighted mean over all ranks; integers by their maximum.

    It takes one collective for each kind of number, however many tensors there are. Half precision is summed in
    float32. Ranks may pass different weights; their sum must be positive. With a ``group`` of all ranks that is theirs
    alone, a thread may do so while this rank works, whose seconds are not counted.
    """
    if world_size() == 1:
        return
    tensors = list(tensors)
    flats = flatten(tensors, weight, meeting_place(tensors))
    for flat, _ in flats:
        _all_reduce(flat, op_of(flat), group)
        if flat.is_floating_point() and not flat[-1] > 0:
            check_total(float(flat[-1]))
    write_back(flats)


def check_total(weight: float) -> None:
    """Refuse weights of all ranks whose sum is not positive."""
    if not weight > 0:
        raise ValueError(f"The weights of all ranks add up to {weight}: a mean needs a positive sum.")


@torch.no_grad()
def sum_(tensor: Tensor) -> None:
    """Replace a tensor, in place, by its sum over all ranks."""
    if world_size() > 1:
        total = tensor.to(meeting_place([tensor]))
        _all_reduce(total, dist.ReduceOp.SUM)
        if total is not tensor:
            tensor.copy_(total)


def count_all_reduce(tensors: Iterable[Tensor]) -> None:
    """Add to the traffic the tensors that torch's DDP has summed over all ranks. Nothing is exchanged."""
    if world_size() > 1:
        given = [*tensors]
        num_bytes, by_hosts = sum(tensor.nbytes for tensor in given), sums_by_hosts(meeting_place(given))
        with counted(_sent_by_sum(num_bytes, by_hosts=by_hosts), waits=False):
            pass


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor], source: int = 0) -> None:
    """Replace each tensor, in place, by the one on rank ``source``."""
    if world_size() == 1:
        return
    tensors = list(tensors)
    place, groups = meeting_place(tensors), dict[torch.dtype, list[Tensor]]()
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for dtype, group in groups.items():
        flat = torch.cat(_moved(group, dtype, place))
        with counted(flat.nbytes * (world_size() - 1) / world_size()):
            dist.broadcast(flat, source)
        scatter_back(flat, group)


def all_gather_rows(row: Tensor) -> Tensor:
    """The rows of all ranks, on every rank, shape ``(P, *row.shape)``."""
    if world_size() == 1:
        return row[None]
    own = row.to(meeting_place([row])).contiguous()
    rows = own.new_empty((world_size(), *row.shape))
    with counted(row.nbytes * (world_size() - 1)):
        dist.all_gather(list(rows), own)
    return rows.to(row.device)


def gather_numbers(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of all ranks, on every rank: a list for each rank. All ranks must pass equally many."""
    rows: list[list[int]] = all_gather_rows(torch.tensor([int(number) for number in numbers], device=device)).tolist()
    return rows


def gather_objects(item: Any, *, everywhere: bool = False) -> list[Any] | None:
    """The objects of all ranks, on rank 0, or ``everywhere``; else ``None``. For checkpoints, not for every step.

    An object must be readable by ``torch.load(weights_only=True)``: tensors, numbers, text, plain containers of these.
    """
    if world_size() == 1:
        return [item]
    file = io.BytesIO()
    torch.save(item, file)
    content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(meeting_place([]))
    lengths = [length for (length,) in gather_numbers([len(content)], content.device)]
    content = torch.nn.functional.pad(content, (0, max(lengths) - len(content)))  # a gather needs equal lengths
    pieces: Iterable[Tensor]
    if everywhere:
        pieces = all_gather_rows(content)
    else:
        pieces = [torch.empty_like(content) for _ in lengths] if rank() == 0 else []
        with counted(0.0 if rank() == 0 else len(content)):
            dist.gather(content, pieces or None, dst=0)
    contents = [piece[:length].cpu().numpy().tobytes() for piece, length in zip(pieces, lengths, strict=False)]
    return [torch.load(io.BytesIO(octets), map_location="cpu", weights_only=True) for octets in contents] or None


def _all_reduce(flat: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> None:
    by_hosts = hosts is not None and group is None and sums_by_hosts(flat.device)
    with counted(_sent_by_sum(flat.nbytes, by_hosts=by_hosts), waits=group is None):
        if by_hosts:
            hosts.sum_(flat, op)
        else:
            dist.all_reduce(flat, op=op, group=group)


def sums_by_hosts(device: torch.device) -> bool:
    """Whether sums of tensors on a device go within hosts first."""
    return hosts is not None and bool(hosts.are_shared) and device.type == "cpu"


def _sent_by_sum(num_bytes: int, *, by_hosts: bool) -> Sent | float:
    """What a rank sends for a sum of ``num_bytes`` bytes over all ranks."""
    if by_hosts:
        sent: Sent = hosts.sent(num_bytes)
        return sent
    return 2 * num_bytes * (world_size() - 1) / world_size()


@contextmanager
def counted(num_bytes: float | Sent, *, waits: bool = True, of_boundary: bool = False) -> Iterator[None]:
    """Add these bytes to the traffic, and the seconds that the block takes, unless nobody waits for it.

    Where it is not said whom they are sent to, each rank sends to the next one. What is ``of_boundary`` is added to the
    traffic of the boundary, too.
    """
    start = time.perf_counter()
    if not isinstance(num_bytes, Sent):
        num_bytes = Sent(num_bytes, 0.0) if hosts is None else hosts.sent_in_ring(num_bytes)
    try:
        yield
    finally:
        seconds = time.perf_counter() - start if waits else 0.0
        with _counting:  # some blocks run in the background
            traffic.bytes_sent += num_bytes.all
            traffic.bytes_between_hosts += num_bytes.between_hosts
            traffic.seconds += seconds
            if of_boundary:
                traffic.boundary_bytes += num_bytes.all
                traffic.boundary_seconds += seconds


def meeting_place(tensors: Iterable[Tensor]) -> torch.device:
    """The device that tensors are exchanged on: theirs, or, if all are in RAM, one that the process group can read."""
    elsewhere = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if elsewhere is not None:
        return elsewhere
    if world_size() == 1 or "gloo" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# Many tensors as a few vectors, of which ranks make sums and maxima, and back. Nothing is exchanged.


def flatten(tensors: Iterable[Tensor], weight: float, device: torch.device) -> list[tuple[Tensor, list[Tensor]]]:
    """One vector for each kind of number, whose sums over ranks make a mean: weighed, and the weight at its end.

    Beside each stand the tensors that it holds. The order of kinds is the same on all ranks. Integers go without a
    weight, for a maximum: they count (the batches that a norm has seen), and of counts a mean would be one that no rank
    has come to.

    Vectors are on ``device``, wherever tensors are: Adam keeps the number of its steps in RAM, and its moments where
    the parameters are.
    """
    groups: dict[torch.dtype, list[Tensor]] = {torch.float32: [], torch.float64: [], torch.int64: []}
    for tensor in tensors:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        floating = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        groups[floating if tensor.is_floating_point() else torch.int64] += [tensor] if tensor.numel() else []
    flats = []
    for dtype, group in groups.items():
        if group:
            group.sort(key=attrgetter("device.type"))  # each device's together
            pieces = _moved(group, dtype, device)
            weights = [pieces[0].new_ones(1)] if dtype.is_floating_point else []
            flat = torch.cat([*pieces, *weights])
            flats.append((flat.mul_(weight) if dtype.is_floating_point else flat, group))
    return flats


def op_of(flat: Tensor) -> dist.ReduceOp.RedOpType:
    """What ranks make of a vector of :func:`flatten`."""
    return dist.ReduceOp.SUM if flat.is_floating_point() else dist.ReduceOp.MAX


def write_back(flats: Iterable[tuple[Tensor, list[Tensor]]]) -> None:
    """Make means of what :func:`flatten` gave and ranks have reduced. Without weight, floats stay as they are."""
    for flat, group in flats:
        if not flat.is_floating_point():
            scatter_back(flat, group)
        elif (total := float(flat[-1])) > 0:
            scatter_back(flat[:-1].div_(total), group)


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Put the pieces of a vector in the place of tensors, one after the other."""
    runs = [list(run) for _, run in groupby(tensors, key=attrgetter("device"))]
    for run, part in zip(runs, flat.split([sum(t.numel() for t in run) for run in runs]), strict=True):
        pieces = part.to(run[0].device).split([t.numel() for t in run])  # one copy for all that are elsewhere
        for tensor, piece in zip(run, pieces, strict=True):
            tensor.detach().copy_(piece.view_as(tensor))  # into the old storage: optimizers and compiled graphs hold it


def _moved(tensors: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Vectors of a type on a device that hold the tensors in their order; neighbours on another make one copy."""
    vectors = []
    for place, run in groupby(tensors, key=attrgetter("device")):
        pieces = [tensor.detach().reshape(-1).to(dtype) for tensor in run]
        vectors += pieces if place == device else [torch.cat(pieces).to(device)]
    return vectors


_WORDS_AT_ONCE = 1 << 22  # bounds what a checksum holds beside the tensors


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """A hash of the bits of tensors, below 2**62. Nothing is exchanged."""
    total = 0
    for tensor in (each for each in tensors if each.numel()):
        plain = tensor.detach().resolve_conj()
        content = octets(plain)
        if plain.device.type == "cpu":
            of_tensor = zlib.crc32(content.numpy().data) << 16 ^ zlib.adler32(content.numpy().data)
        else:
            of_tensor = hash_there(content)
        total = (total * 31 + of_tensor) % (1 << 62)
    return total


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one after the other, uint8."""
    if not tensor.numel():  # numpy's empty arrays have a stride of 0, which no view survives
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().view(-1).view(torch.uint8)


def hash_there(content: Tensor) -> int:
    """A hash of bytes on a device, which it computes there."""
    total = 0
    for part in content.split(8 * _WORDS_AT_ONCE):
        words = torch.nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)
        place = torch.arange(1, 2 * len(words), 2, device=words.device)
        # Folded before it is multiplied, so that every bit counts, even the sign of the last number.
        mixed = (words ^ ((words >> 32) & 0xFFFFFFFF) ^ (words >> 7)) * (place * 0x9E3779B1 + 1 | 1)
        total = (total * 31 + int((mixed ^ (mixed >> 32)).sum())) % (1 << 62)
    return total
