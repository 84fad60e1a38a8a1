"""Rows of own nodes sent to the ranks that need them within a forward, and their gradients sent back in the backward.

    forward    x_in = [own rows | rows of other ranks]
    backward   gradient of own rows = that of x_in here + those that other ranks send for the rows they were sent

The gradients are added in the order of ranks, so that a run gives the same bits as the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.codec import Codec

_DIRECTIONS = ("forward", "forward, without gradient", "backward")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Route(NamedTuple):
    """Which rows go where between two layers.

    Attributes:
        told: For each rank, which of the own rows it needs.
        asked: For each rank, where the rows that it sends stand among all that are received.
    """

    told: list[Tensor]
    asked: list[Tensor]

    @property
    def num_asked(self) -> int:
        return sum(map(len, self.asked))


class Place(NamedTuple):
    """Where in the work of a rank an exchange stands.

    Attributes:
        step: Which step of the training.
        forward: Which forward of the step, from 1.
        layer: The layer that has made the rows, from 0.
    """

    step: int
    forward: int
    layer: int


class DifferentPlacesError(RuntimeError):
    """Ranks would exchange what belongs to different layers."""


class RowExchange:
    """Exchanges rows between the layers of a model. Every rank must run the same layers equally often.

    The ranks compare where they are before each exchange: one that has skipped a backward, or has other layers, is
    named on all.

    Args:
        channel: The ranks.
        codec: Packs rows and gradients into fewer bytes. None: they travel as they are.
        seed: Decides how they are rounded, together with the step, the layer and the rank.
    """

    def __init__(self, channel: Channel, codec: Codec | None = None, seed: int = 0) -> None:
        self._channel, self._codec, self._seed = channel, codec, seed
        self._step = self._forwards = 0

    def begin_step(self, step: int) -> None:
        """Begin a step of the training: what is drawn in it depends on its number, however a fit came to it."""
        self._step, self._forwards = step, 0

    def begin(self) -> Tensor:
        """Begin a forward, and return its thread, which ties the exchanges to the result."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "The model was run again in the backward (torch.utils.checkpoint), where ranks cannot exchange rows: "
                "checkpoint what lies within a layer, or nothing."
            )
        self._forwards += 1
        return torch.zeros((), requires_grad=torch.is_grad_enabled())

    def gather(self, rows: Tensor, thread: Tensor, route: Route, layer: int) -> tuple[Tensor, Tensor]:
        """Return the own rows with those of other ranks below them, and the thread. Collective, as is its backward.

        Args:
            rows: The own rows, a row for each node.
            thread: What :meth:`begin` or the exchange before returned.
            route: Which rows go where.
            layer: The number of the layer that has made the rows.
        """
        gathered, thread = _Gather.apply(rows, thread, self, route, Place(self._step, self._forwards, layer))  # type: ignore[no-untyped-call]
        return gathered, thread

    def forward(self, rows: Tensor, route: Route, place: Place, *, has_gradient: bool) -> Tensor:
        if rows.dtype not in _DTYPES:
            names = ", ".join(map(str, _DTYPES))
            raise TypeError(f"Layer {place.layer} returned rows of {rows.dtype}, and ranks exchange rows of {names}.")
        pieces = [rows[which.to(rows.device)].cpu() for which in route.told]
        received = self._exchange(
            pieces, route.asked, place, "forward" if has_gradient else "forward, without gradient"
        )
        gathered = rows.new_empty((len(rows) + route.num_asked, *rows.shape[1:]))
        gathered[: len(rows)] = rows
        below = gathered[len(rows) :]
        for places, piece in zip(route.asked, received, strict=True):
            below[places.to(rows.device)] = piece.to(rows.device)
        return gathered

    def backward(self, gradient: Tensor, num_own: int, route: Route, place: Place) -> Tensor:
        own, below = gradient[:num_own].clone(), gradient[num_own:]
        pieces = [below[places.to(below.device)].cpu() for places in route.asked]
        received = self._exchange(pieces, route.told, place, "backward")
        for which, piece in zip(route.told, received, strict=True):
            own.index_add_(0, which.to(own.device), piece.to(own.device))
        return own

    def _exchange(self, pieces: list[Tensor], expected: list[Tensor], place: Place, direction: str) -> list[Tensor]:
        packed = self._packed(pieces, place, direction)
        try:
            self._compare(pieces[0], place, direction)
            received = self._channel.exchange(packed, [len(which) for which in expected], of_boundary=True)
        except DifferentPlacesError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"Rank {self._channel.rank} exchanged rows in step {place.step}, behind layer {place.layer} "
                f"({direction}), and {self._channel.who_is_gone()} did not answer. See what was said there."
            ) from error
        return received if self._codec is None else [self._codec.unpack(piece, pieces[0]) for piece in received]

    def _packed(self, pieces: list[Tensor], place: Place, direction: str) -> list[Tensor]:
        """Return what is sent of rows: these, or what the codec makes of them."""
        if self._codec is None:
            return pieces
        numbers = (self._seed, self._channel.rank, *place, _DIRECTIONS.index(direction))
        chance = torch.Generator().manual_seed(_mixed(*numbers))
        return [self._codec.pack(piece, chance) for piece in pieces]

    def _compare(self, rows: Tensor, place: Place, direction: str) -> None:
        """Refuse to exchange with ranks that are elsewhere. Collective."""
        bits = 0 if self._codec is None else self._codec.bits
        kind = [_DTYPES.index(rows.dtype), rows.shape[1:].numel(), bits]
        own = torch.tensor([[*place, _DIRECTIONS.index(direction), *kind]])
        size = self._channel.size
        ranks = torch.cat(self._channel.exchange([own] * size, [1] * size, of_boundary=True)).tolist()
        other = next((number for number, where in enumerate(ranks) if where != ranks[0]), None)
        if other is not None:
            raise DifferentPlacesError(
                f"Ranks exchange rows of different layers: rank 0 is {_told(ranks[0])}; rank {other} is "
                f"{_told(ranks[other])}. Every rank must run the same layers on every batch, forward and backward: "
                "training_step may neither return None nor call the model once more on one rank alone."
            )


class _Gather(torch.autograd.Function):
    """The exchange as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, thread: Tensor, exchange: RowExchange, route: Route, place: Place
    ) -> tuple[Tensor, Tensor]:
        ctx.known = exchange, route, place, len(rows)
        return exchange.forward(rows, route, place, has_gradient=ctx.needs_input_grad[0]), thread.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, thread: Tensor) -> Any:
        exchange, route, place, num_own = ctx.known
        own = exchange.backward(gradient, num_own, route, place) if ctx.needs_input_grad[0] else None
        return own, thread, None, None, None


class _Tied(torch.autograd.Function):
    """Rows that have every exchange of their forward behind them, whatever they were computed from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, thread: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.weight == 1.0 else gradient * ctx.weight, gradient.new_zeros(()), None


def tied(rows: Tensor, thread: Tensor, weight: float = 1.0) -> Tensor:
    """The rows, with a gradient for the thread, so that every rank runs the backward of every exchange.

    Args:
        rows: What the last layer has made.
        thread: What the last exchange returned.
        weight: What the gradients of the rows are multiplied by.
    """
    result: Tensor = _Tied.apply(rows, thread, weight)  # type: ignore[no-untyped-call]
    return result


def _told(where: Sequence[int]) -> str:
    step, forward, layer, direction, dtype, width, bits = where
    kind = str(_DTYPES[dtype]).removeprefix("torch.") + (f" in {bits} bits" if bits else "")
    where_in_step = f"step {step}, forward {forward}, behind layer {layer}"
    return f"in {where_in_step} ({_DIRECTIONS[direction]}, rows of {width} {kind})"


def _mixed(*numbers: int) -> int:
    """One number below 2**63 of several, another for each."""
    total = 0
    for number in numbers:
        total = ((total ^ number) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % (1 << 63)
    return total
