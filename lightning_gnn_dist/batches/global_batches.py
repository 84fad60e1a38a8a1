"""Batches of the whole graph for every rank, which correct the replicas after they trained on parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, in_type
from lightning_gnn_dist.batches.batches import Ahead, chunks_of, made_in_turn, slice_of
from lightning_gnn_dist.batches.source import BatchSource, BulkSeeds
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.engine.sample import BatchKey

_PASSES = 1 << 20  # more than a round has passes, so that every pass of every round has its own number


class OwnSeeds(NamedTuple):
    """The training nodes of one rank.

    Attributes:
        ids: Their ids in the whole graph.
        inputs: Where each of them stands among those of all ranks.
        num_all: The number of training nodes of all ranks.
        rank: The rank.
        num_ranks: The number of ranks.
    """

    ids: Tensor
    inputs: Tensor
    num_all: int
    rank: int
    num_ranks: int

    def check_slice(self, rank: int, num_slices: int) -> None:
        """Refuse a slice of batches that has seeds of other ranks."""
        if (rank, num_slices) != (self.rank, self.num_ranks):
            raise ValueError(
                f'Correction(way="rank0") computes whole batches on one rank, and with GlobalBatching(deal="own") rank '
                f'{self.rank} of {self.num_ranks} knows its own seeds alone: use way="sliced", or deal="any".'
            )


@dataclass(frozen=True, eq=False)
class GlobalBatches:
    """Batches of seeds drawn uniformly from all training nodes, with their neighbours in the whole graph.

    A batch depends on the seed, the round and its number in the round alone. Ranks share it: rank ``p`` has slice ``p``
    of its seeds. With all neighbours, the slices see the edges that the whole batch would. With a fan-out they see a
    few in a thousand more, if few nodes are seeds: a seed of another slice that is reached as a neighbour draws
    neighbours in that hop, too. If seeds are links, a slice hides its own targets from messages, not those of others.

    Args:
        source: Makes batches of the whole graph.
        seeds: The training nodes of the whole graph; or those that one rank knows, its own ones: then every rank deals
            its own to all batches of a pass, as evenly as their number allows, in an order of its own. So batches have
            about ``batch_size`` seeds, and slices may be empty.
        batch_size: Seeds of one batch, all slices together.
        seed: Decides every random choice.
        bulk_size: Batches that are made together; this does not change what is drawn.
        dtype: The type of all floating point numbers. Default: as the source makes them.
        has_inputs: Give batches an ``input_id``: where each seed stands in ``seeds``.
        in_background: Whether bulks that other ranks are asked for are made before they are due: within a round, and
            the first batch of the next one when a round has taken its last.
        follows: Returns whether another round follows, as far as it is known.
    """

    source: BatchSource
    seeds: Tensor | OwnSeeds
    batch_size: int
    seed: int
    bulk_size: int = 1
    dtype: torch.dtype | None = None
    has_inputs: bool = False
    in_background: bool = False
    follows: Callable[[], bool] = lambda: False
    _begun: dict[tuple[int, int, int, int], Ahead] = field(default_factory=dict, init=False)

    @property
    def num_batches(self) -> int:
        """Batches in a pass over all training nodes; of a tensor, a pass leaves out those that do not fill a batch."""
        count = self.seeds.num_all if isinstance(self.seeds, OwnSeeds) else self.seeds.numel()
        return max(1, count // self.batch_size)

    def of_round(
        self, round_idx: int, rank: int = 0, num_slices: int = 1, start: int = 0, stop: int | None = None
    ) -> Iterator[SampledData]:
        """Yield the slices of ``rank`` of the round's batches ``start`` to ``stop``, or without end."""
        if stop is not None and start >= stop:
            return
        if not self.source.is_remote:  # one bulk after the other
            for bulk in chunks_of(count(start) if stop is None else range(start, stop), self.bulk_size):
                made = self.source.make(*self._asked(round_idx, rank, num_slices, bulk))
                yield from made if self.dtype is None else map(partial(in_type, dtype=self.dtype), made)  # holds none
            return
        place, runs = (rank, num_slices, start), list[Ahead]()
        if (first := self._begun.pop((round_idx, *place), None)) is not None:
            runs, start = [first], start + 1
        if self._begun:
            self.close()  # what was begun for another round
        is_ahead = self.in_background and self.source.depth(1) > 0
        numbers = count(start) if stop is None else range(start, stop)
        runs.append(self._made(round_idx, rank, num_slices, numbers, is_ahead=is_ahead))
        try:
            runs[-1].begin()
            for run in runs:
                made = iter(run.next, None)
                yield from made if self.dtype is None else map(partial(in_type, dtype=self.dtype), made)  # holds none
        finally:
            for run in runs:
                run.close()
        if is_ahead and self.follows():
            following = self._made(round_idx + 1, rank, num_slices, [place[-1]], is_ahead=True)
            self._begun[round_idx + 1, *place] = following
            following.begin()

    def close(self) -> None:
        """End what was begun for the next round."""
        while self._begun:
            self._begun.popitem()[1].close()

    def _made(self, round_idx: int, rank: int, num_slices: int, numbers: Iterable[int], *, is_ahead: bool) -> Ahead:
        chunks = chunks_of(numbers, self.bulk_size, grows=is_ahead)
        asked = map(partial(self._asked, round_idx, rank, num_slices), chunks)
        return made_in_turn(self.source, asked, int(is_ahead), lambda: self.source.depth(1))

    def _asked(self, round_idx: int, rank: int, num_slices: int, bulk: list[int]) -> BulkSeeds:
        places = [self._places(round_idx, index, rank, num_slices) for index in bulk]
        keys = [BatchKey(self.seed + Purpose.CORRECTIONS, round_idx, index) for index in bulk]
        ids: Any = self.seeds
        inputs = places
        if isinstance(self.seeds, OwnSeeds):
            ids, inputs = self.seeds.ids, [self.seeds.inputs[at] for at in places]
        return [ids[at] for at in places], keys, inputs if self.has_inputs else None

    def _places(self, round_idx: int, index: int, rank: int, num_slices: int) -> Tensor:
        """Where the seeds of a rank's slice of one batch stand: passes follow each other, each in its own order."""
        number, within = divmod(index, self.num_batches)
        seed = self.seed + Purpose.CORRECTIONS
        if isinstance(self.seeds, OwnSeeds):
            self.seeds.check_slice(rank, num_slices)
            count = self.seeds.ids.numel()
            order = permutation(count, seed * num_slices + rank, round_idx * _PASSES + number)
            return order[slice_of(count, self.num_batches, within)]
        count = self.seeds.numel()
        size, order = min(self.batch_size, count), permutation(count, seed, round_idx * _PASSES + number)
        return order[within * size : (within + 1) * size].tensor_split(num_slices)[rank]
