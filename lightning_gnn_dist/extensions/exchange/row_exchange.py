"""Rows of own nodes sent to the ranks that need them within a forward, and their gradients sent back in the backward.

    forward    x_in = [own rows | rows of other ranks]
    backward   gradient of own rows = that of x_in here + those that other ranks send for the rows they were sent

The gradients are added in the order of ranks, so that a run gives the same bits as the one before. What comes from
other ranks may be older than the step, or some of what there is: see :class:`Thrift`. Rows on a GPU go from its memory
to that of others if the channel reaches it (:mod:`~lightning_gnn_dist.wire.channel` says in which order), else by RAM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn_dist.extensions.exchange.shipments import DTYPES, Place, Route, Shipment, Shipping, Thrift
from lightning_gnn_dist.wire.channel import Channel


class RowExchange:
    """Exchanges rows between the layers of a model. Every rank must run the same layers equally often.

    Args:
        channel: The ranks. Nobody else uses it before :meth:`close`.
        seed: Random seed. What is drawn depends on the step, the layer and the ranks, too.
        thrift: How bytes and time are saved.
    """

    def __init__(self, channel: Channel, seed: int = 0, thrift: Thrift = Thrift()) -> None:  # noqa: B008  # frozen
        self._shipping = Shipping(channel, seed, thrift)
        self._step = self._forwards = 0

    def begin_step(self, step: int) -> None:
        """Begin a step of the training: what is drawn in it depends on its number, however a fit came to it."""
        if step <= self._step:  # the same pass again, to which nothing of the one before belongs
            self._shipping.forget()
        self._step, self._forwards = step, 0

    def close(self) -> None:
        """End what is under way, and the connections. Not collective."""
        self._shipping.close()

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
            drawn = self._shipping.drawn(route, place)
            pieces = [rows[which.to(rows.device)].to(self._shipping.device) for which in drawn.to_send]
            return self._shipping.send(place, drawn, pieces, drawn.to_receive, route.to_receive)

        came = self._shipping.latest(place, send)
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
            pieces = [below[places.to(below.device)].to(self._shipping.device) for places in drawn.to_receive]
            return self._shipping.send(place, drawn, pieces, drawn.to_send, route.to_send)

        came = self._shipping.latest(place, send)
        if not came.is_used:  # gradients of long ago, added in each step, would lead astray
            came.is_used = True
            for which, piece in zip(came.route.to_send, came.pieces(), strict=True):
                own.index_add_(0, which.to(own.device), piece.to(own.device))
        return own


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
