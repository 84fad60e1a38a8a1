"""Batches in time: the next bulk is sampled and its features gathered while this one trains."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Generic, TypeAlias, TypeVar

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, assemble, writes_of
from lightning_gnn_dist.batches.device_stream import Bulk, DeviceStream, bulk_of, next_of
from lightning_gnn_dist.batches.file_rows import FileRows
from lightning_gnn_dist.batches.pool import BufferPool, Pool
from lightning_gnn_dist.checks import check_at_least
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.large_pages import enlarge_pages
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler, check_seeds

Item = TypeVar("Item")
Result = TypeVar("Result")
Place: TypeAlias = Callable[[Graph, Sampler], tuple[Graph, Sampler]]

THREAD_NAME = "lightning_gnn_dist.batches.loader"
CLOSED = "The loader was closed while it was iterated over. Iterate over it anew."
WRITTEN = (
    "Something was written into a batch of the whole part, whose tensors all its batches share: write into a copy, "
    "batch.clone()."
)
FORKED = "This iterator belongs to the process that this one was forked from. Iterate over the loader anew."

Batches = Generator[SampledData, None, None]


class NoSeedsError(ValueError):
    """There is nothing to make batches of."""


class BatchLoader:
    """The batches of one set of seeds: pass by pass, or as an endless stream.

    A pass deals every seed to exactly one of ``num_batches`` batches of nearly equal size. If there are fewer
    seeds than batches, every batch gets one seed and seeds repeat: ranks that must take the same number of
    steps ask for the same number of batches. Batch ``t`` of the stream is batch ``t % len(self)`` of pass
    ``t // len(self)``, and it is the same whatever the bulk size, the threads and the look-ahead.

    Iterating starts nothing before the first batch is asked for, and no thread outlives its iterator.
    At most ``(prefetch + 1) * bulk_size + 1`` batches exist at a time, and as many buffers for each large
    array, beside the batches that the user keeps. With a ``lane`` at most ``prefetch + 3`` of them are on the device
    if they are made on the CPU, and all of them if the graph is on the device.

    Args:
        graph: The graph to sample, in RAM or memory-mapped, or on a device with a sampler that draws there.
        sampler: Draws the neighbourhoods.
        seeds: Ids of the nodes to compute on, none twice. A sampler of its own kind may take ids of other things.
        num_batches: Batches a pass.
        seed: Decides every random choice, together with the pass, the batch and the node.
        shuffle: Deal the seeds in another order every pass, instead of in the order given.
        bulk_size: Batches that are sampled together.
        num_threads: Threads that sample in the background. With 0, a bulk is sampled when it is due.
        prefetch: Bulks made ahead of the one being consumed. Default: one for each thread and one more.
        widen: Make float32 of float16, bfloat16 and of int8 with scales, as they are gathered.
        num_ids: How many ids there are. Default: as many as nodes.
        lane: Brings batches to a device, where they are handed out. None: they stay where they are made.
        place: Says where the graph is sampled and by whom, when the first batch is asked for. It holds until the loader
            is closed. None: the graph and the sampler as they are.
    """

    num_ranks = 1  # whoever makes loaders for several ranks says so
    batch_sampler = None  # Lightning asks any loader that has a sampler for this too

    def __init__(
        self,
        graph: Graph,
        sampler: Sampler,
        seeds: Tensor,
        num_batches: int,
        *,
        seed: int,
        shuffle: bool = True,
        bulk_size: int = 2,
        num_threads: int = 1,
        prefetch: int | None = None,
        widen: bool = True,
        num_ids: int | None = None,
        lane: DeviceStream | None = None,
        place: Place | None = None,
    ) -> None:
        check_at_least(1, num_batches=num_batches, bulk_size=bulk_size)
        check_at_least(0, num_threads=num_threads, seed=seed)
        prefetch = num_threads + 1 if prefetch is None else prefetch
        check_at_least(max(1, num_threads), prefetch=prefetch)
        if not isinstance(sampler, Sampler) or isinstance(sampler, type):
            raise TypeError(f"sampler must be one like NeighborSampler([15, 10]), got {sampler!r}.")
        seeds = check_seeds(seeds, graph.num_nodes if num_ids is None else num_ids)
        refuse_repeated(seeds)
        if seeds.numel() == 0:
            raise NoSeedsError("There are no seeds to make batches of: is the mask that marks them all false?")
        self._home = self._graph, self._sampler = graph, sampler
        self._place, self._is_placed = place, False
        self._seeds, self._num_batches = seeds, num_batches
        self._seed, self._shuffle, self._widen = seed, shuffle, widen
        self._bulk_size, self._num_threads, self._prefetch = bulk_size, num_threads, prefetch
        self._next_pass, self._lane = 0, lane
        self._files: FileRows | None = None
        self._orders: dict[int, Tensor] = {}
        self._pools: dict[str, BufferPool] = {}
        self._constant: tuple[Sample, SampledData, list[int]] | None = None
        self._running: set[_Ahead[list[int], Bulk]] = set()
        self.waited_seconds = 0.0  # time that the consumer stood still, since the loader was made

    def __len__(self) -> int:
        return self._num_batches

    @property
    def num_seeds(self) -> int:
        return self._seeds.numel()

    def spare_memory(self) -> None:
        """From here on hold no pages of a mapped graph, which takes longer. Not where a copy of it is sampled."""
        self._files = FileRows(self._graph)

    @property
    def sampler(self) -> BatchLoader:
        """The loader itself: Lightning calls ``loader.sampler.set_epoch``, never ``loader.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass that begins. Without this, passes count from 0."""
        self._next_pass = epoch

    def __iter__(self) -> Batches:
        # A generator, so that all of this waits for the first batch to be asked for. Lightning creates
        # the iterator of its first epoch before it calls set_epoch.
        begin = self._next_pass * len(self)
        self._next_pass += 1
        yield from self._batches(range(begin, begin + len(self)))

    def stream(self, start: int) -> Batches:
        """Batches without end, from number ``start``; passes are numbered by this alone."""
        return self.between(start, None)

    def between(self, start: int, stop: int | None) -> Batches:
        """The stream's batches ``start`` to ``stop``, or without end."""
        check_at_least(0, start=start)
        return self._batches(count(start) if stop is None else range(start, stop))

    def close(self) -> None:
        """End what runs in the background and free the buffers. Iterators that are open fail from here on."""
        for ahead in list(self._running):
            ahead.close()
        self._pools.clear()
        self._constant = None
        (self._graph, self._sampler), self._is_placed = self._home, False

    def _batches(self, numbers: Iterable[int]) -> Batches:
        if self._place is not None and not self._is_placed:
            (self._graph, self._sampler), self._is_placed = self._place(*self._home), True
        ahead = _Ahead(self._make, _chunks(numbers, self._bulk_size), self._num_threads, self._prefetch)
        self._running.add(ahead)
        try:
            while bulk := self._wait_for(ahead):
                while bulk:
                    yield next_of(bulk, self._lane)
                    ahead.check()
        finally:
            ahead.close()
            self._running.discard(ahead)

    def _wait_for(self, ahead: _Ahead[list[int], Bulk]) -> Bulk | None:
        start = time.perf_counter()
        try:
            return ahead.next()
        finally:
            self.waited_seconds += time.perf_counter() - start

    def _make(self, numbers: list[int]) -> Bulk:
        """One bulk, a pure function of the numbers of its batches. Runs in several threads at once."""
        enlarge_pages(self._graph)
        places = [BatchKey(self._seed, *divmod(number, len(self))) for number in numbers]
        seeds = [self._seeds_of(place) for place in places]
        return bulk_of(lambda: self._batches_around(seeds, places), self._lane)

    def _batches_around(self, seeds: list[Tensor], places: list[BatchKey]) -> Iterable[SampledData]:
        """A batch for every entry of ``seeds``, made here and now."""
        samples = self._sampler.sample_bulk(self._graph, seeds, places)
        if self._files is None or self._graph is not self._home[0]:
            return map(self._assemble, samples)
        self._files.release()
        return [self._files.assemble(sample, widen=self._widen) for sample in samples]

    def _seeds_of(self, place: BatchKey) -> Tensor:
        begin, end = (batch * self.num_seeds // len(self) for batch in (place.batch, place.batch + 1))
        if self.num_seeds < len(self):
            begin = place.batch % self.num_seeds
            end = begin + 1
        return self._seeds[self._order(place.epoch)[begin:end]] if self._shuffle else self._seeds[begin:end]

    def _order(self, epoch: int) -> Tensor:
        order = self._orders.get(epoch)
        if order is None:
            if isinstance(self._sampler, OrdersSeeds):
                order = self._sampler.order(self._graph, self._seeds, self._seed, epoch)
            else:
                order = permutation(self.num_seeds, self._seed, epoch)
            # Kept for two passes, as a bulk may belong to both. Two threads may compute the same order.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1} | {epoch: order}
        return order

    def _assemble(self, sample: Sample) -> SampledData:
        if not sample.is_constant:
            return assemble(self._graph, sample, self._pool_of, widen=self._widen)
        kept = self._constant
        if kept is None or kept[0] is not sample:
            whole = assemble(self._graph, sample, widen=self._widen)
            whole = whole if self._lane is None else whole.to(self._lane.device)
            self._constant = kept = sample, whole, writes_of(whole)
        elif kept[2] != writes_of(kept[1]):
            raise RuntimeError(WRITTEN)
        return copy.copy(kept[1])  # the user may set attributes of a batch, or drop them

    def _pool_of(self, name: str) -> Pool:
        if self._lane is not None:
            return self._lane.pool
        pool = self._pools.get(name)
        if pool is None:  # one for each array, whose batches are all of nearly the same size
            pool = self._pools.setdefault(name, BufferPool((self._prefetch + 1) * self._bulk_size + 1))
        return pool


class _Ahead(Generic[Item, Result]):
    """Applies ``work`` to items ahead of their consumer, in order, on threads that end with it."""

    def __init__(self, work: Callable[[Item], Result], items: Iterator[Item], num_threads: int, depth: int) -> None:
        self._work, self._items, self._depth = work, items, depth
        self._threads = ThreadPoolExecutor(num_threads, THREAD_NAME) if num_threads else None
        self._pending: deque[Future[Result]] = deque()
        self._closed, self._process = False, os.getpid()

    def check(self) -> None:
        """Raise if there is nothing to come."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._threads is not None and self._process != os.getpid():  # they stayed there
            raise RuntimeError(FORKED)

    def next(self) -> Result | None:
        """The next result, or None after the last."""
        self.check()
        if self._threads is None:
            return next(map(self._work, self._items), None)
        # The one that is consumed, and `depth` ahead of it.
        for item in islice(self._items, self._depth + 1 - len(self._pending)):
            self._pending.append(self._threads.submit(self._work, item))
        try:
            return self._pending.popleft().result() if self._pending else None
        except CancelledError as error:  # by close() in another thread
            raise RuntimeError(CLOSED) from error

    def close(self) -> None:
        """Forget what is not begun and wait for what is. An exception may be under way: raise none here."""
        self._closed = True
        self._pending.clear()
        if self._threads is not None:
            # A worker may be the one whose garbage collection finds an abandoned iterator.
            is_worker = threading.current_thread().name.startswith(THREAD_NAME)
            self._threads.shutdown(wait=not is_worker, cancel_futures=True)


def _chunks(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    iterator = iter(numbers)
    while chunk := list(islice(iterator, size)):
        yield chunk


def batches_of_ranks(count: int, num_ranks: int, batch_size: int) -> int:
    """As many batches on all ranks, for modules that exchange in validation_step; none of them empty."""
    most, least = -(-count // num_ranks), count // num_ranks
    return min(-(-most // batch_size), least)
