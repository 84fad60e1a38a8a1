"""How seeds are dealt to the batches of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_ids
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey, refuse_repeated

Order = Callable[[Tensor, int, int], Tensor | None]


class NoSeedsError(ValueError):
    """There are no seeds to make batches of."""


@dataclass(eq=False)
class Deal:
    """Deals every seed to one of the batches of a pass, of nearly equal sizes, in another order every pass.

    With fewer seeds than batches, every batch gets one seed, and seeds repeat. Several may deal the same seeds: then
    each of them makes the same deal of all, and has the batches of its place.

    Args:
        seeds: Distinct ids of nodes, or what else a source takes as seeds, int64.
        num_batches: Batches per pass, of each who deals the seeds.
        seed: Decides the orders, and what is drawn around the seeds.
        shuffle: Whether orders change; otherwise seeds stand in the order given.
        inputs: A number for each seed, that batches hold as ``input_id``. Default: they hold none.
        num_taken: How many of the seeds a pass takes. Default: all. It goes with ``shuffle``.
        place: The number of this one among those who deal the same seeds.
        num_places: How many they are.
    """

    seeds: Tensor
    num_batches: int
    seed: int
    shuffle: bool = True
    inputs: Tensor | None = None
    num_taken: int | None = None
    place: int = 0
    num_places: int = 1
    _orders: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_at_least(1, num_batches=self.num_batches)
        check_at_least(0, seed=self.seed)
        check_ids("The seeds of a batch", self.seeds)
        self.seeds = self.seeds.to(torch.int64).contiguous()
        refuse_repeated(self.seeds)
        if self.seeds.numel() == 0:
            raise NoSeedsError("There are no seeds to make batches of: is the mask that marks them all false?")

    @property
    def num_seeds(self) -> int:
        """The seeds of a pass that this one learns from."""
        if self.num_places == 1:
            return self._num_all
        own = range(self.place, self.num_batches * self.num_places, self.num_places)
        return sum(self.size(batch) for batch in own if batch < self._num_all)

    def key(self, number: int) -> BatchKey:
        """Return the key of a batch of the stream. Its batch is the number among those of all who deal the seeds."""
        epoch, batch = divmod(number, self.num_batches)
        return BatchKey(self.seed, epoch, batch * self.num_places + self.place)

    def repeats(self, batch: int) -> bool:
        """Return whether a batch has nothing of its own to learn from."""
        return batch >= self._num_all

    def size(self, batch: int) -> int:
        """Return the number of seeds of a batch."""
        places = self._slice(batch)
        return int(places.stop - places.start)

    def places(self, key: BatchKey, order_of: Order) -> Tensor | slice:
        """Return where the seeds of a batch stand among all; ``order_of`` may choose the order of a pass."""
        places = self._slice(key.batch)
        return self._order(key.epoch, order_of)[places] if self.shuffle else places

    @property
    def _num_all(self) -> int:
        """The seeds of a pass, of all who deal them."""
        return self.seeds.numel() if self.num_taken is None else self.num_taken

    def _slice(self, batch: int) -> slice:
        count, num_batches = self._num_all, self.num_batches * self.num_places
        if count < num_batches:
            begin = batch % count
            return slice(begin, begin + 1)
        return slice_of(count, num_batches, batch)

    def _order(self, epoch: int, order_of: Order) -> Tensor:
        order = self._orders.get(epoch)
        if order is None:
            order = order_of(self.seeds, self.seed, epoch)
            order = permutation(self.seeds.numel(), self.seed, epoch) if order is None else order
            # Kept for two passes, as a bulk may span both. Two threads may compute the same order.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1} | {epoch: order}
        return order


def slice_of(count: int, num_slices: int, number: int) -> slice:
    """Where slice ``number`` lies if ``count`` things are cut into slices of nearly equal length."""
    return slice(number * count // num_slices, (number + 1) * count // num_slices)
