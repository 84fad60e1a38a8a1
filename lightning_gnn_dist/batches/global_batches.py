"""Batches of the whole graph for every rank, which correct the replicas after they trained on parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, in_type
from lightning_gnn_dist.batches.batches import Ahead, chunks_of, slice_of
from lightning_gnn_dist.batches.source import BatchSource, BulkSeeds
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.engine.sample import BatchKey

_PASSES = 1 << 20  # more than a round has passes, so that every pass of every round has its own number


class OwnSeeds(NamedTuple):
    """What one rank knows of what all ranks learn.

    Attributes:
        ids: What it learns itself.
        num_all: How much all ranks learn.
    """

    ids: Tensor
    num_all: int


@dataclass(frozen=True, eq=False)
class GlobalBatches:
    """Batches of seeds drawn uniformly from all training nodes, with their neighbours in the whole graph.

    A batch depends on the seed, the round and its number in the round alone. Ranks share it: rank ``p`` has slice ``p``
    of its seeds. With all neighbours, the slices see the edges that the whole batch would. With a fan-out they see a
    few in a thousand more, if few nodes are seeds: a seed of another slice that is reached as a neighbour draws
    neighbours in that hop, too. If seeds are links, a slice hides its own targets from messages, not those of others.

    Args:
        source: Makes batches of the whole graph.
        seeds: What all ranks learn; or what one rank knows, its own: then every rank deals its own to all batches of a
            pass, as evenly as their number allows, in an order of its own. So batches have about ``batch_size`` seeds,
            and slices may be empty.
        batch_size: Seeds of one batch, all slices together.
        seed: Decides every random choice.
        bulk_size: Batches that are made together; this does not change what is drawn.
        dtype: The type of all floating point numbers. Default: as the source makes them.
        has_inputs: Give batches an ``input_id``: where each seed stands in ``seeds``.
        in_background: Whether bulks that other ranks or files are asked for are made before they are due.
    """

    source: BatchSource
    seeds: Tensor | OwnSeeds
    batch_size: int
    seed: int
    bulk_size: int = 1
    dtype: torch.dtype | None = None
    has_inputs: bool = False
    in_background: bool = False

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
        is_ahead = self.in_background and self.source.is_remote and self.source.depth(1) > 0
        chunks = chunks_of(count(start) if stop is None else range(start, stop), self.bulk_size, grows=is_ahead)
        run = Ahead(self.source, partial(self._asked, round_idx, rank, num_slices), chunks, int(is_ahead), 1)
        try:
            yield from map(partial(in_type, dtype=self.dtype), iter(run.next, None))  # holds none
        finally:
            run.close()

    def _asked(self, round_idx: int, rank: int, num_slices: int, bulk: list[int]) -> BulkSeeds:
        ids = self.seeds.ids if isinstance(self.seeds, OwnSeeds) else self.seeds
        places = [self._places(round_idx, index, rank, num_slices) for index in bulk]
        keys = [BatchKey(self.seed + Purpose.CORRECTIONS, round_idx, index) for index in bulk]
        return [ids[at] for at in places], keys, places if self.has_inputs else None

    def _places(self, round_idx: int, index: int, rank: int, num_slices: int) -> Tensor:
        """Where the seeds of a rank's slice of one batch stand: passes follow each other, each in its own order."""
        number, within = divmod(index, self.num_batches)
        seed = self.seed + Purpose.CORRECTIONS
        if isinstance(self.seeds, OwnSeeds):
            count = self.seeds.ids.numel()
            order = permutation(count, seed * num_slices + rank, round_idx * _PASSES + number)
            return order[slice_of(count, self.num_batches, within)]
        count = self.seeds.numel()
        size, order = min(self.batch_size, count), permutation(count, seed, round_idx * _PASSES + number)
        return order[within * size : (within + 1) * size].tensor_split(num_slices)[rank]
