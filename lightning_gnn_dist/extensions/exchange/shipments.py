"""What ranks send each other for one layer, forward or backward: compared, and used for as long as was asked.

A shipment may be used in later steps than the one in which it was sent; gradients are added once, rows are used until
the next ones come:

    every=3                  sent in steps 1, 4, 7 ...   used in 1 2 3, 4 5 6, 7 8 9 ...
    overlap=True             sent in every step          used in the next one; the first is used in the first, too
    every=3, overlap=True    sent in steps 1, 4, 7 ...   used in 1 2 3 4, 5 6 7, 8 9 10 ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.wire.channel import CPU, Background, Channel
from lightning_gnn_dist.wire.collectives import counted

DIRECTIONS = ("forward", "forward, without gradient", "backward")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
THREAD_NAME = "lightning_gnn_dist.extensions.exchange.shipments"


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

    def to(self, device: torch.device) -> Route:
        """Return the same with its places on the device that has the rows, so that no step waits for a copy of them."""
        return Route(*([places.to(device) for places in of_ranks] for of_ranks in self))


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


@dataclass(frozen=True)
class Thrift:
    """How bytes and time are saved.

    Args:
        every: Steps between two shipments.
        overlap: Whether a shipment is used from the step after its own, so that no step but the first waits for it.
        share: The share of the rows between two ranks that is drawn to travel, at least one.
    """

    every: int = 1
    overlap: bool = False
    share: float = 1.0

    @property
    def is_kept(self) -> bool:
        """Whether shipments are used in later steps."""
        return self.overlap or self.every > 1


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


class Shipping:
    """Sends to the ranks of a channel, and keeps what comes.

    Ranks compare where they are before anything is sent: one that has skipped a backward, or has other layers, is named
    on all.

    Args:
        channel: The ranks. Nobody else uses it before :meth:`close`.
        seed: Random seed.
        thrift: What is saved.

    Attributes:
        device: Where ranks send from: RAM, or the GPU that computes.
    """

    def __init__(self, channel: Channel, seed: int, thrift: Thrift) -> None:
        self._channel, self._seed, self._thrift = channel, seed, thrift
        self._kept: dict[tuple[int, int, str, int], Shipment] = {}
        self.device = channel.device
        self._thread = Background(THREAD_NAME) if thrift.overlap and self.device == CPU else None
        channel.is_waited_for, channel.is_of_boundary = not thrift.overlap, True

    def forget(self) -> None:
        """Keep nothing of earlier steps."""
        self._kept.clear()

    def close(self) -> None:
        """End what is under way, if that takes no more than some seconds, and the connections. Not collective."""
        self.forget()
        if self._thread is not None:
            self._thread.close()
        self._channel.close()

    def latest(self, place: Place, send: Callable[[], Shipment]) -> Shipment:
        """Return what is used at a place: what ``send`` ships now, or what was shipped for it in an earlier step."""
        if not self._thrift.is_kept:
            return send()
        key, every = place[1:], self._thrift.every
        before = self._kept.get(key)
        if before is not None and (before.step - 1) // every == (place.step - 1) // every:
            return before
        now = self._kept[key] = send()
        return before if self._thrift.overlap and before and place.step - before.step <= every else now

    def send(
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

        if not self._thrift.overlap:
            return Shipment(place.step, route, scaled(self._exchanged(place, pieces, lengths)()))
        if self._thread is None:  # a stream does what a thread does for RAM
            came = self._exchanged(place, pieces, lengths)
            return Shipment(place.step, route, lambda: scaled(came()))
        sent = self._thread.submit(lambda: scaled(self._exchanged(place, pieces, lengths)()))
        return Shipment(place.step, route, sent.result)

    def drawn(self, route: Route, place: Place) -> Route:
        """Return the way of the rows that are drawn to travel. Those who send and who receive draw the same."""
        if self._thrift.share == 1.0:
            return route
        rank, size = self._channel.rank, self._channel.size
        to_send = [self._drawn(which, place, rank, other) for other, which in enumerate(route.to_send)]
        to_receive = [self._drawn(route.to_receive[other], place, other, rank) for other in range(size)]
        return Route(to_send, to_receive)

    def _drawn(self, which: Tensor, place: Place, sender: int, receiver: int) -> Tensor:
        number = math.ceil(self._thrift.share * len(which))
        order = torch.randperm(len(which), generator=self._chance(place, sender, receiver))
        drawn = order[:number].sort().values
        return which[drawn if which.device == CPU else drawn.pin_memory().to(which.device, non_blocking=True)]

    def _chance(self, place: Place, *ranks: int) -> torch.Generator:
        return torch.Generator().manual_seed(_mixed(self._seed, *ranks, *_numbers(place)))

    def _exchanged(self, place: Place, pieces: list[Tensor], lengths: list[int]) -> Callable[[], list[Tensor]]:
        """Exchange, or begin to on a GPU if nobody waits for it, and return what returns the rows."""
        try:
            self._compare(pieces[0], place)
            if self._thrift.overlap and self.device != CPU:
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
