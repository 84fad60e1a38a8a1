"""The base of sources whose batches need rows that lie elsewhere: bulks are drawn some way ahead of their rows.

seeds of the coming bulks -> what they draw -> the rows of the first of them, those that others need again are kept

Where other ranks are asked, an exchange asks for the rows of a bulk, the last hop of the next one, the hop before of
the one after, and so on: a bulk goes through an exchange for each hop and one for its rows, and takes one on average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, bytes_of, store_of_seeds
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import BatchSource, BulkSeeds, Inputs, MadeBulk, Stream, handed_out
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.larger_than_memory.tables import Bulk, Tables
from lightning_gnn_dist.homes.settings import Loading
from lightning_gnn_dist.sampling.turns import Inquiry, Steps, take_turn

MOST_KNOWN = 8  # bulks whose draws are known when rows are chosen for the cache
MOST_AHEAD = 32  # bulks, where they are so small that any number would fit


Draw = Callable[[Sequence[Tensor], Sequence[BatchKey]], Steps[list[Sample]]]
Drawing = tuple[Inquiry[Bulk], Inputs | None]


class AheadSource(BatchSource):
    """Makes batches bulk after bulk, in one thread, and knows what the next bulks draw when it asks for rows.

    Args:
        tables: The rows that lie elsewhere, and who answers what drawing batches and fetching their rows asks.
        draw: Draws the batches of a bulk, by their seeds and keys.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
        widen: Which narrow types become float32. Default: all.
    """

    is_remote = True

    def __init__(
        self, tables: Tables[Any], draw: Draw, loading: Loading, *, stream: Stream | None = None, widen: Widen = True
    ) -> None:
        super().__init__(stream)
        self._tables, self._draw, self._loading, self._widen = tables, draw, loading, widen
        self._bulk_bytes = 0

    def depth(self, prefetch: int) -> int:
        """Return how many bulks of the largest size so far fit into ``ahead_bytes``, one at least; 0 for no bytes."""
        if not self._loading.ahead_bytes:
            return 0
        return min(max(1, self._loading.ahead_bytes // max(1, self._bulk_bytes)), MOST_AHEAD if self._bulk_bytes else 1)

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        return next(self.make_in_turn(iter([(seeds, keys, inputs)])))[1]

    def make_in_turn(self, bulks: Iterator[BulkSeeds]) -> Iterator[MadeBulk]:
        """Make one bulk after the other; the next ones are drawn beside it.

        Of these there are as many as a bulk is drawn in exchanges, and with a cache some more, so that it knows what is
        needed soonest, in no more memory than it takes. The first bulk is drawn alone, so that it comes soon.
        """
        line, beside = deque[Drawing](), 0
        for made in count(1):
            known = min(made + beside, MOST_KNOWN) if self._tables.cache.has_room else 1
            self._admit(line, bulks, 3, known, beside)
            if not line:
                return
            turns = self._draw_first(line)
            if made == 1 and self._loading.ahead_bytes:
                beside = turns
                self._admit(line, bulks, 1, known, beside)
            work, inputs = line.popleft()
            others = [other for other, _ in line]
            yield len(work.result.samples), handed_out(partial(self._made, work.result, inputs, others), self._stream)

    def _drawn(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[Bulk]:
        return self._tables.seek((yield from self._draw(seeds, keys)))

    def _draw_first(self, line: deque[Drawing]) -> int:
        """Draw all of the first bulk, and more of the next ones; return in how many exchanges."""
        turns = 0
        while not line[0][0].is_done:
            take_turn([work for work, _ in line], self._tables.ask)
            turns += 1
        return turns

    def _admit(self, line: deque[Drawing], bulks: Iterator[BulkSeeds], count: int, known: int, beside: int) -> None:
        """Begin some bulks more, as long as there are not so many to be known and, beside them, to be drawn."""
        for _ in range(count):
            if len(line) >= known + beside or (len(line) >= 2 + beside and not self._have_room(line)):
                return
            asked = next(bulks, None)
            if asked is None:
                return
            line.append((Inquiry(self._drawn(*asked[:2])), asked[2]))

    def _have_room(self, line: deque[Drawing]) -> bool:
        """Return whether draws take less memory than the cache."""
        held = sum(bytes_of_draw(sample) for work, _ in line if work.is_done for sample in work.result.samples)
        return held < self._tables.cache.num_bytes

    def _made(self, bulk: Bulk, inputs: Inputs | None, others: Sequence[Inquiry[Bulk]]) -> list[SampledData]:
        coming = [work.result for work in takewhile(lambda work: work.is_done, others)]
        how: dict[str, Any] = {"widen": self._widen, "all_labels": self._loading.all_labels}
        filling = Inquiry(self._tables.fill(bulk, coming, self._pool_of, **how))
        while not filling.is_done:
            take_turn([filling, *others], self._tables.ask)
        made = filling.result
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            store_of_seeds(batch).input_id = given
        self._bulk_bytes = max(self._bulk_bytes, sum(map(bytes_of, made)))
        return made


def bytes_of_draw(sample: Sample) -> int:
    """Return the bytes of what was drawn for a batch."""
    tensors = sample.nodes, sample.indptr, sample.indices, sample.edge_ids, *sample.extra.values()
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
