"""Rows sent from rank to rank, on connections of their own. Every byte is counted.

``open_channel`` and ``Channel.exchange`` are collective: all ranks must call them, in the same order.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.wire.collectives import counted, keeps_on_host, kept_on_host, rank, world_size
from lightning_gnn_dist.wire.octets import octets

_SECONDS_TO_SAY = 5.0  # that an exchange has failed on a rank, too


class LostRankError(RuntimeError):
    """An exchange has failed, as another rank did not take part in it: :func:`explain` finds out which."""


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
        first = rank() - self.rank
        return who_is_gone(range(first, first + self.size))

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


def note_host() -> None:
    """Write on the ranks' store where this one runs, for the errors of others."""
    if world_size() > 1:
        _store().set(f"host/{rank()}", socket.gethostname())


def explain(error: BaseException) -> None:
    """If an exchange of all ranks has failed by this error, name in it those that did not answer, in some seconds."""
    is_lost = isinstance(error, LostRankError | dist.DistError) or "gloo" in str(error)
    if world_size() > 1 and isinstance(error, RuntimeError) and is_lost:
        gone = who_is_gone(range(world_size()))
        error.args = (f"{gone[0].upper()}{gone[1:]} did not answer. See what was said there. ({error})",)


def who_is_gone(ranks: Sequence[int]) -> str:
    """After an exchange has failed: say so, and name those of the ranks that do not, within some seconds."""
    told, hosts = set[int](), dict[int, str]()
    asking = Thread(target=_ask_who_failed, args=(ranks, told, hosts), daemon=True)  # a store may never answer
    asking.start()
    asking.join(_SECONDS_TO_SAY + 1.0)
    silent = sorted({*ranks} - {*told}) if rank() in told else [0]  # rank 0 serves the store
    named = [f"{each} on {hosts[each]}" if each in hosts else str(each) for each in silent]
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named)}" if named else "some rank"


def _ask_who_failed(ranks: Sequence[int], told: set[int], hosts: dict[int, str]) -> None:
    """Say on the ranks' store that this rank's exchange has failed, and add to ``told`` who says so as well."""
    deadline = time.monotonic() + _SECONDS_TO_SAY
    with suppress(RuntimeError):  # rank 0, whose store it is, is gone
        store = _store()
        store.set(f"failed/{rank()}", "")
        told.add(rank())
        hosts |= {each: store.get(f"host/{each}").decode() for each in ranks if store.check([f"host/{each}"])}
        while {*ranks} - told and time.monotonic() < deadline:
            told |= {each for each in {*ranks} - told if store.check([f"failed/{each}"])}
            time.sleep(0.05)


def _store() -> Any:
    return dist.PrefixStore("exchanges", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
