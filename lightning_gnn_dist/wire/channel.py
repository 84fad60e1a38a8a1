"""Rows sent from rank to rank, on connections of their own, and in the background. Every byte is counted.

``open_channel`` and the exchanges of a ``Channel`` are collective: all ranks must call them, in the same order.

Rows on a GPU are sent from its memory where ranks reach each other by NCCL, on a communicator and a stream beside those
of DDP. Two communicators of NCCL can wait for each other for ever, if ranks use them in different orders and the first
keeps a device or its host from beginning the second. They do not here, by this:

    order     A rank exchanges behind layer 1, 2 ... in the forward, and behind ... 2, 1 in the backward; behind a layer
              once for each node type, in the order of types. Autograd goes back in the order in which the forward came,
              and hands each weight's gradient to DDP as soon as it is there. All ranks run the same layers, so these
              sums, too, stand in one place among the exchanges. A rank that has nothing to send calls as the others do.
    hosts     Before each exchange between layers the hosts compare, by gloo, which one it is. So none is begun before
              all ranks have come to it, and ranks that are elsewhere raise instead of waiting.
    streams   The stream that computes waits for an exchange where its rows are read, and for DDP's sums at the end of a
              backward alone. The stream of an exchange waits for what was computed before it, the one of DDP's sums for
              gradients: neither waits for the other. A host that waits for its device within a step, as a module may,
              waits for exchanges that all ranks have begun. So where a weight has no gradient on one rank, and its sum
              begins there at the end of the backward, that sum waits on the others beside the exchanges, not before.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from operator import mul
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.addresses import kept_on_host
from lightning_gnn_dist.wire.collectives import (
    Sent,
    average_,
    broadcast_,
    counted,
    gather_numbers,
    octets,
    rank,
    world_size,
)

Result = TypeVar("Result")
CPU = torch.device("cpu")
_OF_DEVICE = "cpu:gloo,cuda:nccl"  # one group with two backends: each tensor goes by that of its device
_SECONDS_TO_END = 5.0  # that an exchange in the background has at the end; ranks that are well take part at once
_SECONDS_TO_SAY = 5.0  # that an exchange has failed on a rank, too


class LostRankError(RuntimeError):
    """An exchange has failed, as another rank did not take part in it: :func:`explain` finds out which."""


class Channel:
    """A group of ranks that exchange rows on connections of their own.

    Args:
        group: The process group of these ranks. None: that of all ranks.
        size: How many ranks there are in it.
        rank: The number of this rank among them.
        device: Where rows are sent from, CPU or a GPU. Other tensors may be sent from RAM in any case.
        hosts: The hosts whose first ranks these are, where they exchange for all ranks; the group is then of the hosts.

    Attributes:
        is_waited_for: Whether this rank waits for what it exchanges, so that the seconds count.
        is_of_boundary: Whether it exchanges rows between layers, which are counted apart, too.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, size: int, rank: int, device: torch.device = CPU, hosts: Any = None
    ) -> None:
        self.hosts = hosts
        self._group, self.size, self.rank, self.device = group, size, rank, device
        self.is_waited_for, self.is_of_boundary = True, False

    def exchange(self, pieces: Sequence[Tensor], lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Send ``pieces[i]`` to rank ``i``; return what each rank sent here. All tensors are on one device.

        Args:
            pieces: A tensor for each rank, of any length; type and shape of a row are the same on all ranks.
            lengths: The lengths of the tensors to receive, if known. Either all ranks give them or none.
        """
        if lengths is None and self.size > 1:
            own, found = torch.tensor([len(piece) for piece in pieces]), torch.empty(self.size, dtype=torch.int64)
            with counted(self._sent([own.element_size()] * self.size)):
                self._all_to_all(found, own, [1] * self.size, [1] * self.size)
            lengths = found.tolist()
        return self.begin(pieces, lengths or [], in_background=False)()

    def begin(
        self, pieces: Sequence[Tensor], lengths: Sequence[int], *, in_background: bool = True
    ) -> Callable[[], list[Tensor]]:
        """Begin an exchange of rows on a GPU; return what lets the current stream wait for it, and returns the rows.

        The arguments are those of :meth:`exchange`.
        """
        if self.size == 1:
            return lambda: list(pieces)
        empty = pieces[0][:0]
        width = empty.element_size() * math.prod(empty.shape[1:])
        to_send, to_receive = [len(piece) * width for piece in pieces], [length * width for length in lengths]
        sent = torch.cat([octets(piece) for piece in pieces])
        received = sent.new_empty(sum(to_receive))
        with counted(self._sent(to_send), waits=self.is_waited_for, of_boundary=self.is_of_boundary):
            work = self._all_to_all(received, sent, to_receive, to_send, in_background=in_background)

        def came() -> list[Tensor]:
            if work is not None:
                work.wait()
            return list(received.view(empty.dtype).view(-1, *empty.shape[1:]).split(list(lengths)))

        return came

    def exchange_equal(self, pieces: Tensor) -> Tensor:
        """Send row ``i`` of ``pieces`` to rank ``i``; return the rows that come here: shape ``(ranks, numbers)``."""
        return torch.stack(self.exchange([*pieces], [pieces.shape[1]] * self.size))

    def average_(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Replace tensors in RAM by their means over the ranks, which are all there are; see ``collectives``."""
        average_(tensors, weight, self._group)

    def who_is_gone(self) -> str:
        """After an exchange has failed: name the ranks that do not say so, too, within some seconds."""
        first = rank() - self.rank
        return who_is_gone(range(first, first + self.size))

    def close(self) -> None:
        """End the connections. Not collective."""
        if self._group is not None and self.hosts is None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _sent(self, to_send: Sequence[int]) -> Sent | float:
        num_bytes = sum(to_send) - to_send[self.rank]
        if self.hosts is not None:
            return Sent(num_bytes, num_bytes)
        if collectives.hosts is None:
            return num_bytes
        sent: Sent = collectives.hosts.sent_to(to_send, rank() - self.rank)
        return sent

    def _all_to_all(
        self, received: Tensor, sent: Tensor, to_receive: list[int], to_send: list[int], *, in_background: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = dist.all_to_all_single(received, sent, to_receive, to_send, self._group, in_background)
        return work


@torch.no_grad()
def all_gather_pieces(pieces: Sequence[Tensor], lengths: Sequence[Sequence[int]] | None = None) -> list[list[Tensor]]:
    """The pieces of all ranks, on every rank: a list for each rank, in the order of ranks. Collective.

    Ranks pass equally many pieces, at least one, all on one device. A piece has the same type and the same shape on
    all ranks, but for its first dimension. No byte is sent to fill up the shorter ones.

    Args:
        pieces: This rank's.
        lengths: The lengths of the pieces of each rank, where all ranks know them. Otherwise a rank says them before.
    """
    if world_size() == 1:
        return [list(pieces)]
    if lengths is None:
        lengths = gather_numbers([len(piece) for piece in pieces], pieces[0].device)
    found = []
    for source, of_rank in enumerate(lengths):
        is_own = source == rank()
        theirs = [
            piece if is_own else piece.new_empty((length, *piece.shape[1:]))
            for piece, length in zip(pieces, of_rank, strict=True)
        ]
        if any(of_rank):
            broadcast_(theirs, source)
        found.append(theirs)
    return found


@torch.no_grad()
def exchange_pieces(
    to_ranks: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[Sequence[int]]]
) -> list[list[Tensor]]:
    """Send ``to_ranks[i]`` to rank ``i``; return the pieces that each rank sent here. Collective.

    Args:
        to_ranks: For each rank the pieces, equally many for all. A piece has the same type and the same shape on all
            ranks, but for its first dimension.
        lengths: The lengths of the pieces that rank ``i`` sends to rank ``j``, as ``lengths[i][j]``. All ranks know
            them; where nobody sends another anything, nothing is exchanged.
    """
    here, ranks = rank(), range(world_size())
    own = list(to_ranks[here])
    if not any(sum(lengths[source][to]) for source in ranks for to in ranks if source != to):
        return [own if source == here else [piece[:0] for piece in own] for source in ranks]
    widths = [piece.element_size() * math.prod(piece.shape[1:]) for piece in own]
    sizes = [sum(map(mul, of_source[here], widths)) for of_source in lengths]
    to_receive = [0 if source == here else sizes[source] for source in ranks]
    packed = [torch.cat([octets(piece[:0] if to == here else piece) for piece in to_ranks[to]]) for to in ranks]
    received = Channel(None, world_size(), here).exchange(packed, to_receive)
    return [own if source == here else _unpacked(received[source], lengths[source][here], own) for source in ranks]


def _unpacked(packed: Tensor, lengths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the pieces that lie one after the other in ``packed``, copied: numbers must lie at their width."""
    found, start = [], 0
    for piece, length in zip(like, lengths, strict=True):
        made = piece.new_empty((length, *piece.shape[1:]))
        if made.numel():
            made.view(-1).view(torch.uint8).copy_(packed[start : start + made.nbytes])
        start += made.nbytes
        found.append(made)
    return found


class Background:
    """A thread that runs exchanges in the order in which they are given. A process that ends does not wait for it.

    An executor of Python's would: a rank that raises while another stands still would say so only when the exchange
    between them gives up, half an hour later.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run some work after all that was given before."""
        future = Future[Result]()
        self._given.put((future, work))
        return future

    def close(self) -> None:
        """Run what was given, and end; wait some seconds for that at most."""
        self._given.put(None)
        self._thread.join(_SECONDS_TO_END)

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            future, work = given
            try:
                future.set_result(work())
            except BaseException as error:  # raised where the result is waited for
                future.set_exception(error)


def open_channel(size: int, device: torch.device = CPU) -> Channel:
    """Divide the ranks into channels of ``size`` consecutive ranks, and return this rank's. Collective.

    Args:
        size: How many ranks there are in a channel.
        device: Where the rows lie that ranks will send. From a GPU they go as they are if the ranks have NCCL; else
            they travel through RAM, and the channel's ``device`` says so.
    """
    if world_size() % size:
        raise ValueError(f"{world_size()} ranks cannot be divided into channels of {size}.")
    if size == 1:
        return Channel(None, 1, 0, device)
    starts, is_direct = range(0, world_size(), size), device.type == "cuda" and "nccl" in dist.get_backend_config()
    backend = _OF_DEVICE if is_direct else "gloo"
    with kept_on_host():
        groups = [dist.new_group(range(start, start + size), patience(), backend) for start in starts]
    return Channel(groups[rank() // size], size, rank() % size, device if is_direct else CPU)


def patience() -> timedelta:
    """How long the ranks' process group waits in a collective."""
    world = dist.group.WORLD
    assert world is not None
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    waits: timedelta = world._get_backend(torch.device(device)).options._timeout
    return waits


def note_host() -> None:
    """Write on the ranks' store where this one runs, for the errors of others."""
    _store().set(f"host/{rank()}", socket.gethostname())


def explain(error: BaseException) -> None:
    """If an exchange of all ranks has failed by this error, name in it those that did not answer, in some seconds."""
    is_told = isinstance(error, LostRankError | dist.DistError) or "gloo" in str(error)
    if world_size() > 1 and isinstance(error, RuntimeError) and is_told:
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
