"""Rows sent from rank to rank, on connections of their own. Every byte is counted.

``open_channel`` and ``Channel.exchange`` are collective: all ranks must call them, in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.wire.collectives import counted, keeps_on_host, kept_on_host, octets, rank, world_size

_SECONDS_TO_SAY = 5.0  # that an exchange has failed on a rank, too


class Channel:
    """A group of ranks that exchange rows on connections of their own.

    Args:
        group: The process group of these ranks, or None for a single rank.
        size: How many ranks there are in it.
        rank: The number of this rank among them.

    Attributes:
        is_waited_for: Whether this rank waits for what it exchanges, so that the seconds count.
        is_of_boundary: Whether it exchanges rows between layers, which are counted apart, too.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        self._group, self.size, self.rank = group, size, rank
        self.is_waited_for, self.is_of_boundary = True, False

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Send ``pieces[i]`` to rank ``i``; return what each rank sent here. All tensors are on the CPU.

        Args:
            pieces: A tensor for each rank, of any length; type and shape of a row are the same on all ranks.
            lengths: The lengths of the tensors to receive, if known. Either all ranks give them or none.
        """
        if self.size == 1:
            return list(pieces)
        lengths = self._lengths(pieces) if lengths is None else lengths
        empty = pieces[0][:0]
        width = empty.element_size() * math.prod(empty.shape[1:])
        sent = torch.cat([octets(piece) for piece in pieces])
        received = sent.new_empty(sum(lengths) * width)
        sizes = [len(piece) * width for piece in pieces]
        num_bytes = sum(sizes) - sizes[self.rank]
        with counted(num_bytes, waits=self.is_waited_for, of_boundary=self.is_of_boundary):
            self._all_to_all(received, sent, [n * width for n in lengths], sizes)
        rows = received.view(empty.dtype).view(-1, *empty.shape[1:])
        return list(rows.split(list(lengths)))

    def exchange_equal(self, pieces: Tensor) -> Tensor:
        """Send ``pieces[i]`` to rank ``i``; return what each rank sent here, all of the same shape on the CPU."""
        if self.size == 1:
            return pieces
        sent = octets(pieces)
        received, sizes = torch.empty_like(sent), [len(sent) // self.size] * self.size
        with counted(len(sent) - sizes[0], waits=self.is_waited_for, of_boundary=self.is_of_boundary):
            self._all_to_all(received, sent, sizes, sizes)
        return received.view(pieces.dtype).view(pieces.shape)

    def who_is_gone(self) -> str:
        """After an exchange has failed: name the ranks that do not say so, too, within some seconds."""
        told: list[int] = []
        asking = Thread(target=self._ask_who_failed, args=(told,), daemon=True)  # a store may never answer
        asking.start()
        asking.join(_SECONDS_TO_SAY + 1.0)
        gone = sorted({*range(self.size)} - {self.rank, *told})
        return f"rank {gone[0]}" if len(gone) == 1 else f"ranks {gone}" if gone else "some rank"

    def explain(self, error: BaseException) -> None:
        """Name in the error of another exchange of these ranks those that did not answer, within some seconds."""
        text = str(error)
        if isinstance(error, RuntimeError) and ("gloo" in text or isinstance(error, dist.DistError)):
            error.args = (f"{self.who_is_gone()} did not answer. See what was said there. ({text})",)

    def _ask_who_failed(self, told: list[int]) -> None:
        """Say on the ranks' store that this rank's exchange has failed, and add to ``told`` who says so as well."""
        deadline = time.monotonic() + _SECONDS_TO_SAY
        with suppress(RuntimeError):  # rank 0, whose store it is, is gone
            store = dist.PrefixStore("exchange-failed", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
            store.set(str(self.rank), "")
            while len(told) < self.size - 1 and time.monotonic() < deadline:
                others = {*range(self.size)} - {self.rank, *told}
                told += [rank for rank in others if store.check([str(rank)])]
                time.sleep(0.05)

    def close(self) -> None:
        """End the connections. Not collective."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _all_to_all(self, received: Tensor, sent: Tensor, to_receive: list[int], to_send: list[int]) -> None:
        dist.all_to_all_single(received, sent, to_receive, to_send, group=self._group)

    def _lengths(self, pieces: Sequence[Tensor]) -> list[int]:
        sent = torch.tensor([len(piece) for piece in pieces])
        received = torch.empty_like(sent)
        with counted(sent.element_size() * (self.size - 1)):
            self._all_to_all(received, sent, [1] * self.size, [1] * self.size)
        lengths: list[int] = received.tolist()
        return lengths


def all_to_all_bytes(sent: Sequence[Tensor], to_receive: Sequence[int]) -> list[Tensor]:
    """Send the bytes ``sent[i]`` to rank ``i``; return those that each sent here, ``to_receive[i]`` from rank ``i``."""
    sizes = [len(each) for each in sent]
    received = sent[0].new_empty(sum(to_receive))
    with counted(sum(sizes) - sizes[rank()]):
        dist.all_to_all_single(received, torch.cat(list(sent)), list(to_receive), sizes)
    return list(received.split(list(to_receive)))


def open_channel(size: int) -> Channel:
    """Divide the ranks into channels of ``size`` consecutive ranks, and return this rank's. Collective."""
    if world_size() % size:
        raise ValueError(f"{world_size()} ranks cannot be divided into channels of {size}.")
    if size == 1:
        return Channel(None, 1, 0)
    starts = range(0, world_size(), size)
    with kept_on_host(keeps_on_host()):
        groups = [dist.new_group(range(start, start + size), patience(), backend="gloo") for start in starts]
    return Channel(groups[rank() // size], size, rank() % size)


def patience() -> timedelta:
    """How long the ranks' process group waits in a collective."""
    world = dist.group.WORLD
    assert world is not None
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    waits: timedelta = world._get_backend(torch.device(device)).options._timeout
    return waits
