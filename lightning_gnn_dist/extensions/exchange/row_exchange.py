"""Rows of own nodes sent to the ranks that need them within a forward, and their gradients sent back in the backward.

    forward    x_in = [own rows | rows of other ranks]
    backward   gradient of own rows = that of x_in here + those that other ranks send for the rows they were sent

A shipment may be used in later steps than the one in which it was sent; gradients are added once, rows are used until
the next ones come:

    every=3                  sent in steps 1, 4, 7 ...   used in 1 2 3, 4 5 6, 7 8 9 ...
    overlap=True             sent in every step          used in the next one; the first is used in the first, too
    every=3, overlap=True    sent in steps 1, 4, 7 ...   used in 1 2 3 4, 5 6 7, 8 9 10 ...

The gradients are added in the order of ranks, so that a run gives the same bits as the one before. Rows on a GPU go
from its memory to that of others if the channel reaches it (:mod:`~lightning_gnn_dist.wire.channel` says in which
order), else by RAM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn_dist.wire.channel import CPU, Background, Channel
from lightning_gnn_dist.wire.collectives import counted

DIRECTIONS = ("forward", "forward, without gradient", "backward")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
THREAD_NAME = "lightning_gnn_dist.extensions.exchange.row_exchange"


class Route(NamedTuple):
    """Which rows go where between two layers.

    Attributes:
        to_send: For each rank, which of the own rows it needs.
        to_receive: For each rank, where the rows that it sends stand among all that are received.
    """

    to_send: list[Tensor]
    to_receive: list[Tensor]

    @property
    def num_received(self) -> int:
        return sum(map(len, self.to_receive))


class Place(NamedTuple):
    """Where in the work of a rank an exchange stands.

    Attributes:
        step: Which step of the training.
        forward: Which forward of the step, from 1.
        number: Which exchange of the forward, from 0: behind each layer there is one for each node type.
        direction: One of ``DIRECTIONS``.
        num_types: How many node types there are.
    """

    step: int
    forward: int
    number: int
    direction: str
    num_types: int = 1

    @property
    def layer(self) -> int:
        """The layer that has made the rows, from 0."""
        return self.number // self.num_types


class DifferentPlacesError(RuntimeError):
    """Ranks would exchange what belongs to different layers."""


class Shipment:
    """What the other ranks have sent, or are sending.

    Args:
        step: The step in which it was sent.
        route: The rows that travel, or whose gradients travel.
        pieces: A tensor of each rank, or what waits for these.

    Attributes:
        is_used: Whether its gradients have been added.
    """

    def __init__(self, step: int, route: Route, pieces: list[Tensor] | Callable[[], list[Tensor]]) -> None:
        self.step, self.route, self._pieces = step, route, pieces
        self.is_used = False

    def pieces(self) -> list[Tensor]:
        """A tensor of each rank, where ranks send from. Waits for what is under way."""
        if not isinstance(self._pieces, list):
            with counted(0.0, of_boundary=True):
                self._pieces = self._pieces()
        return self._pieces


class RowExchange:
    """Exchanges rows between the layers of a model, and keeps what comes. All ranks run the same layers equally often.

    Ranks compare where they are before anything is sent: one that has skipped a backward, or has other layers, is named
    on all.

    Args:
        channel: The ranks. Nobody else uses it before :meth:`close`.
        seed: Random seed. What is drawn depends on the step, the layer and the ranks, too.
        every: Steps between two shipments.
        overlap: Whether a shipment is used from the step after its own, so that no step but the first waits for it.
        share: The share of the rows between two ranks that is drawn to travel, at least one.
    """

    def __init__(
        self, channel: Channel, seed: int = 0, *, every: int = 1, overlap: bool = False, share: float = 1.0
    ) -> None:
        self._channel, self._seed = channel, seed
        self._every, self._overlap, self._share = every, overlap, share
        self._step = self._forwards = 0
        self._kept: dict[tuple[int, int, str, int], Shipment] = {}
        self._device = channel.device  # where ranks send from: RAM, or the GPU that computes
        self._thread = Background(THREAD_NAME) if overlap and self._device == CPU else None
        channel.is_waited_for, channel.is_of_boundary = not overlap, True

    def begin_step(self, step: int) -> None:
        """Begin a step of the training: what is drawn in it depends on its number, however a fit came to it."""
        if step <= self._step:  # the same pass again, to which nothing of the one before belongs
            self._kept.clear()
        self._step, self._forwards = step, 0

    def close(self) -> None:
        """End what is under way, if that takes no more than some seconds, and the connections. Not collective."""
        self._kept.clear()
        if self._thread is not None:
            self._thread.close()
        self._channel.close()

    def begin(self) -> Tensor:
        """Begin a forward, and return its thread, which ties the exchanges to the result."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "The model was run again in the backward (torch.utils.checkpoint), where ranks cannot exchange rows: "
                "checkpoint what lies within a layer, or nothing."
            )
        self._forwards += 1
        return torch.zeros((), requires_grad=torch.is_grad_enabled())

    def gather(
        self, rows: Tensor, thread: Tensor, route: Route, number: int, num_types: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the own rows with those of other ranks below them, and the thread. Collective, as is its backward.

        Args:
            rows: The own rows, a row for each node.
            thread: What :meth:`begin` or the exchange before returned.
            route: Which rows go where.
            number: Which exchange of the forward this is, from 0: behind each layer there is one for each node type.
            num_types: How many node types there are.
        """
        where = Place(self._step, self._forwards, number, "forward", num_types)
        gathered, thread = _Gather.apply(rows, thread, self, route, where)  # type: ignore[no-untyped-call]
        return gathered, thread

    def forward(self, rows: Tensor, route: Route, place: Place) -> tuple[Tensor, Route]:
        """Return the own rows with those of others below them, zeros for those left out, and the way of the others."""
        if rows.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise TypeError(f"Layer {place.layer} returned rows of {rows.dtype}, and ranks exchange rows of {names}.")

        def send() -> Shipment:
            drawn = self._drawn_route(route, place)
            pieces = [rows[which.to(rows.device)].to(self._device) for which in drawn.to_send]
            return self._send(place, drawn, pieces, drawn.to_receive, route.to_receive)

        came = self._latest(place, send)
        gathered = rows.new_empty((len(rows) + route.num_received, *rows.shape[1:]))
        gathered[: len(rows)] = rows
        below = gathered[len(rows) :]
        if came.route.num_received < route.num_received:
            below.zero_()
        for places, piece in zip(came.route.to_receive, came.pieces(), strict=True):
            below[places.to(rows.device)] = piece.to(rows.device)
        return gathered, came.route

    def backward(self, gradient: Tensor, num_own: int, route: Route, drawn: Route, place: Place) -> Tensor:
        """Return the gradient of the own rows.

        Args:
            gradient: That of what :meth:`forward` returned.
            num_own: How many of these rows are own.
            route: Which rows go where.
            drawn: The way of those that were not left out.
            place: Where this rank is.
        """
        own, below = gradient[:num_own].clone(), gradient[num_own:]

        def send() -> Shipment:
            pieces = [below[places.to(below.device)].to(self._device) for places in drawn.to_receive]
            return self._send(place, drawn, pieces, drawn.to_send, route.to_send)

        came = self._latest(place, send)
        if not came.is_used:  # gradients of long ago, added in each step, would lead astray
            came.is_used = True
            for which, piece in zip(came.route.to_send, came.pieces(), strict=True):
                own.index_add_(0, which.to(own.device), piece.to(own.device))
        return own

    def _latest(self, place: Place, send: Callable[[], Shipment]) -> Shipment:
        """Return what is used at a place: what ``send`` ships now, or what was shipped for it in an earlier step."""
        every, key = self._every, place[1:]
        if every == 1 and not self._overlap:  # nothing is used in later steps
            return send()
        before = self._kept.get(key)
        if before is not None and (before.step - 1) // every == (place.step - 1) // every:
            return before
        now = self._kept[key] = send()
        return before if self._overlap and before and place.step - before.step <= every else now

    def _send(
        self, place: Place, route: Route, pieces: list[Tensor], expected: list[Tensor], whole: list[Tensor]
    ) -> Shipment:
        """Send a tensor to each rank. Collective.

        Args:
            place: Where this rank is.
            route: The rows that travel, or whose gradients travel.
            pieces: The tensors, where ranks send from.
            expected: Where what comes from each rank will stand.
            whole: Where it would, had none been left out. What comes is scaled up by as much.
        """
        lengths = [len(places) for places in expected]
        scales = [len(places) / max(length, 1) for places, length in zip(whole, lengths, strict=True)]

        def scaled(received: list[Tensor]) -> list[Tensor]:
            return [piece if scale == 1.0 else piece * scale for piece, scale in zip(received, scales, strict=True)]

        if not self._overlap:
            return Shipment(place.step, route, scaled(self._exchanged(place, pieces, lengths)()))
        if self._thread is None:  # a stream does what a thread does for RAM
            came = self._exchanged(place, pieces, lengths)
            return Shipment(place.step, route, lambda: scaled(came()))
        sent = self._thread.submit(lambda: scaled(self._exchanged(place, pieces, lengths)()))
        return Shipment(place.step, route, sent.result)

    def _drawn_route(self, route: Route, place: Place) -> Route:
        """Return the way of the rows that are drawn to travel. Those who send and who receive draw the same."""
        if self._share == 1.0:
            return route
        rank, size = self._channel.rank, self._channel.size
        to_send = [self._drawn(which, place, rank, other) for other, which in enumerate(route.to_send)]
        to_receive = [self._drawn(route.to_receive[other], place, other, rank) for other in range(size)]
        return Route(to_send, to_receive)

    def _drawn(self, which: Tensor, place: Place, sender: int, receiver: int) -> Tensor:
        chance = torch.Generator().manual_seed(_mixed(self._seed, sender, receiver, *_numbers(place)))
        order = torch.randperm(len(which), generator=chance)
        drawn = order[: math.ceil(self._share * len(which))].sort().values
        return which[drawn if which.device == CPU else drawn.pin_memory().to(which.device, non_blocking=True)]

    def _exchanged(self, place: Place, pieces: list[Tensor], lengths: list[int]) -> Callable[[], list[Tensor]]:
        """Exchange, or begin to on a GPU if nobody waits for it, and return what returns the rows."""
        try:
            self._compare(pieces[0], place)
            if self._overlap and self._device != CPU:
                return self._channel.begin(pieces, lengths)
            received = self._channel.exchange(pieces, lengths)
        except DifferentPlacesError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self._channel.rank} exchanged rows in step {place.step}, behind layer {place.layer} "
                f"({place.direction}), and {self._channel.who_is_gone()} did not answer. See what was said there."
            ) from error
        return lambda: received

    def _compare(self, rows: Tensor, place: Place) -> None:
        """Refuse to exchange with ranks that are elsewhere. Collective."""
        size = self._channel.size
        own = torch.tensor([[*_numbers(place), DTYPES.index(rows.dtype), rows.shape[1:].numel()]])
        ranks = torch.cat(self._channel.exchange([own] * size, [1] * size)).tolist()
        other = next((number for number, where in enumerate(ranks) if where != ranks[0]), None)
        if other is not None:
            raise DifferentPlacesError(
                f"Ranks exchange rows of different layers: rank 0 is {_told(ranks[0], place)}; rank {other} is "
                f"{_told(ranks[other], place)}. Every rank must run the same layers on every batch, forward and "
                "backward: training_step may neither return None nor call the model once more on one rank alone."
            )


class _Gather(torch.autograd.Function):
    """The exchange as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, thread: Tensor, exchange: RowExchange, route: Route, place: Place
    ) -> tuple[Tensor, Tensor]:
        if not ctx.needs_input_grad[0]:
            place = place._replace(direction="forward, without gradient")
        gathered, drawn = exchange.forward(rows, route, place)
        ctx.known = exchange, len(rows), route, drawn, place._replace(direction="backward")
        return gathered, thread.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, thread: Tensor) -> Any:
        exchange, *known = ctx.known
        own = exchange.backward(gradient, *known) if ctx.needs_input_grad[0] else None
        return own, thread, None, None, None


class _Tied(torch.autograd.Function):
    """Rows that have every exchange of their forward behind them, whatever they were computed from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, thread: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient if ctx.weight == 1.0 else gradient * ctx.weight
        return own, torch.zeros(()), None  # as the thread is: in RAM


def tied(rows: Tensor, thread: Tensor, weight: float = 1.0) -> Tensor:
    """The rows, with a gradient for the thread, so that every rank runs the backward of every exchange.

    Args:
        rows: What the last layer has made.
        thread: What the last exchange returned.
        weight: What the gradients of the rows are multiplied by.
    """
    result: Tensor = _Tied.apply(rows, thread, weight)  # type: ignore[no-untyped-call]
    return result


def _told(where: Sequence[int], own: Place) -> str:
    step, forward, number, direction, dtype, width = where
    layer = own._replace(number=number).layer
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    where_in_step = f"step {step}, forward {forward}, behind layer {layer}"
    return f"in {where_in_step} ({DIRECTIONS[direction]}, rows of {width} {kind})"


def _numbers(place: Place) -> list[int]:
    return [place.step, place.forward, place.number, DIRECTIONS.index(place.direction)]


def _mixed(*numbers: int) -> int:
    """One number below 2**63 of several, another for each."""
    total = 0
    for number in numbers:
        total = ((total ^ number) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % (1 << 63)
    return total
