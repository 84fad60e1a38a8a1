"""The base of sources whose batches need rows that lie elsewhere: bulks are drawn some way ahead of their rows.

seeds of the coming bulks -> what they draw -> the rows of the first of them, those that others need again are kept
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, bytes_of
from lightning_gnn_dist.batches.device_stream import DeviceStream, handed_out
from lightning_gnn_dist.batches.hetero import SampledHeteroData
from lightning_gnn_dist.batches.loading import Loading, widening
from lightning_gnn_dist.batches.pool import BufferPool, Pool
from lightning_gnn_dist.batches.source import Asked, Inputs, Made
from lightning_gnn_dist.engine.sample import BatchKey, Sample

MOST_KNOWN = 8  # bulks whose draws are known when rows are chosen for the cache
MOST_AHEAD = 32  # bulks, where they are so small that any number would fit


class DrawnBulk(Protocol):
    """Batches that are drawn, without their arrays."""

    @property
    def samples(self) -> list[Sample]:
        """What was drawn, for each batch."""
        ...


class Held(Protocol):
    """A cache of rows, or several."""

    @property
    def num_rows(self) -> int:
        """How many rows it may hold."""
        ...

    @property
    def num_bytes(self) -> int:
        """Their bytes."""
        ...


Bulk = TypeVar("Bulk", bound=DrawnBulk)


class AheadSource(ABC, Generic[Bulk]):
    """Makes batches bulk after bulk, in one thread, and knows what the next bulks draw when it asks for rows.

    A subclass says how a bulk is drawn, and how it gets its arrays.

    Args:
        cache: Holds rows that come again.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
        stays: The type narrower than float32 that a step computes in, if there is one.
    """

    is_remote = True

    def __init__(self, cache: Held, loading: Loading, stream: DeviceStream | None, stays: torch.dtype | None) -> None:
        self._cache, self._loading, self._stream = cache, loading, stream
        self._widen = widening(loading, stays)
        self._pools: dict[str, BufferPool] = {}
        self._num_buffers = self._bulk_bytes = 0

    @abstractmethod
    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Bulk:
        """Draw the batches of a bulk."""

    @abstractmethod
    def _fill(self, bulk: Bulk, coming: Sequence[Bulk]) -> list[SampledData]:
        """Return the batches of a bulk with their arrays. The next bulks say what will be needed again."""

    def depth(self, prefetch: int) -> int:
        """Return how many bulks of the largest size so far fit into ``ahead_bytes``, one at least; 0 for no bytes."""
        if not self._loading.ahead_bytes:
            return 0
        return min(max(1, self._loading.ahead_bytes // max(1, self._bulk_bytes)), MOST_AHEAD if self._bulk_bytes else 1)

    def keep_buffers(self, count: int) -> None:
        self._num_buffers = count

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        return next(self.make_in_turn(iter([(seeds, keys, inputs)])))[1]

    def make_in_turn(self, bulks: Iterator[Asked]) -> Iterator[Made]:
        """Make one bulk after the other. With a cache, bulks are drawn some way ahead of those that are made.

        They are two at first for each that is made, so that nobody waits long for the first one, and no more than take
        as much memory as the cache, beside two.
        """
        drawn: deque[tuple[Bulk, Inputs | None]] = deque()
        for made in count(1):
            looks = min(made, MOST_KNOWN) if self._cache.num_rows else 1
            while len(drawn) < looks and (len(drawn) < 2 or self._have_room(drawn)):
                asked = next(bulks, None)
                if asked is None:
                    break
                drawn.append((self._draw(*asked[:2]), asked[2]))
            if not drawn:
                return
            bulk, inputs = drawn.popleft()
            coming = [other for other, _ in drawn]
            yield len(bulk.samples), handed_out(partial(self._made, bulk, inputs, coming), self._stream)

    def _have_room(self, drawn: deque[tuple[Bulk, Inputs | None]]) -> bool:
        """Return whether draws take less memory than the cache."""
        held = sum(bytes_of_draw(sample) for bulk, _ in drawn for sample in bulk.samples)
        return held < self._cache.num_bytes

    def _made(self, bulk: Bulk, inputs: Inputs | None, coming: Sequence[Bulk]) -> list[SampledData]:
        made = self._fill(bulk, coming)
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            store = batch[batch.seed_type] if isinstance(batch, SampledHeteroData) else batch
            store.input_id = given
        self._bulk_bytes = max(self._bulk_bytes, sum(map(bytes_of, made)))
        return made

    def _pool_of(self, name: str) -> Pool | None:
        if self._stream is not None:
            return self._stream.pool
        return self._pools.setdefault(name, BufferPool(self._num_buffers)) if self._num_buffers else None

    def close(self) -> None:
        """Free the buffers. The data module closes connections and files."""
        self._pools.clear()


def bytes_of_draw(sample: Sample) -> int:
    """Return the bytes of what was drawn for a batch."""
    tensors = sample.nodes, sample.indptr, sample.indices, sample.edge_ids, *sample.extra.values()
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
