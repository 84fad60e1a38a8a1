"""Makes batches ahead of the training: the next bulk is made while this one is consumed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, in_type
from lightning_gnn_dist.batches.deal import Deal
from lightning_gnn_dist.batches.source import BatchSource, BulkSeeds, MadeBulk
from lightning_gnn_dist.checks import check_at_least
from lightning_gnn_dist.sampling.base import check_seeds

Item = TypeVar("Item")
Result = TypeVar("Result")

THREAD_NAME = "lightning_gnn_dist.batches.loader"
CLOSED = "The loader was closed while it was iterated over. Iterate over it anew."
FORKED = "This iterator belongs to the process that this one was forked from. Iterate over the loader anew."

Batches = Generator[SampledData, None, None]


class BatchLoader:
    """The batches to which seeds are dealt: pass by pass, or as an endless stream.

    A pass deals every seed to exactly one batch, of nearly equal size, because ranks that must take the same number
    of steps ask for the same number of batches. Batch ``t`` of the stream is batch ``t % len(self)`` of pass
    ``t // len(self)``, and it is the same whatever the bulk size, the threads and the look-ahead.

    Iterating starts nothing before the first batch is asked for, and no thread outlives its iterator. Beside the
    batches that the user keeps, at most ``(prefetch + 1) * bulk_size + 1`` exist at a time, and as many buffers for
    each large array. If a source sends batches to a device, at most ``prefetch + 3`` of those made on the CPU are on
    it, and all of those made there. A source may decide otherwise on how many bulks are made ahead. Where it asks other
    ranks or reads files, and the next passes are known, their first bulks are made during the last batches of a pass:
    then a thread stays until the next pass, or until the loader is closed.

    Args:
        source: Makes the batches.
        deal: How it deals its seeds.
        bulk_size: Batches that are made together.
        num_threads: Threads that make batches in the background, at most one where other ranks are asked. With 0 a
            bulk is made when it is due.
        prefetch: Bulks made ahead of the one being consumed. Default: one for each thread and one more.
        num_ranks: The number of ranks that the loader was made for; strategies refuse to run on another number.
        dtype: The type of all floating point numbers. Default: as the source makes them.
    """

    batch_sampler = None  # Lightning reads this of any loader that has a sampler

    def __init__(
        self,
        source: BatchSource,
        deal: Deal,
        *,
        bulk_size: int = 2,
        num_threads: int = 1,
        prefetch: int | None = None,
        num_ranks: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_at_least(1, bulk_size=bulk_size)
        check_at_least(0, num_threads=num_threads)
        prefetch = num_threads + 1 if prefetch is None else prefetch
        check_at_least(max(1, num_threads), prefetch=prefetch)
        check_seeds(deal.seeds, source.num_ids)
        source.keep_buffers(int((prefetch + 1) * bulk_size + 1))
        self._source, self._deal, self._bulk_size = source, deal, bulk_size
        self._num_threads = min(num_threads, source.depth(prefetch), *([1] if source.is_remote else []))
        self._prefetch = prefetch
        self._next_pass = 0
        self._running: set[Ahead[Any, MadeBulk]] = set()
        self._kept: _Run | None = None
        self.num_ranks, self._dtype = num_ranks, dtype
        self.num_seeds = deal.num_seeds  # of a pass
        self.waited_seconds = 0.0  # how long consumers have waited for batches, since the loader was made

    @classmethod
    def over(
        cls,
        source: BatchSource,
        seeds: Tensor,
        num_batches: int,
        *,
        seed: int,
        shuffle: bool = True,
        inputs: Tensor | None = None,
        **options: Any,
    ) -> BatchLoader:
        """Return the loader of one set of seeds."""
        return cls(source, Deal(seeds, num_batches, seed, shuffle, inputs), **options)

    def __len__(self) -> int:
        return self._deal.num_batches

    def repeats(self, number: int) -> bool:
        """Return whether a batch of the stream has nothing of its own to learn from."""
        return self._deal.repeats(self._deal.key(number).batch)

    def spare_memory(self) -> None:
        """From now on, keep no pages of mapped files in memory; making batches takes longer."""
        self._source.spare_memory()

    @property
    def sampler(self) -> BatchLoader:
        """The loader itself: Lightning calls ``loader.sampler.set_epoch``, never ``loader.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass. Without this, passes count from 0."""
        self._next_pass = epoch

    def __iter__(self) -> Batches:
        # A generator, so that none of this runs before the first batch is asked for: Lightning creates
        # the iterator of its first epoch before it calls set_epoch.
        begin = self._next_pass * len(self)
        self._next_pass += 1
        yield from self._batches(range(begin, begin + len(self)))

    def stream(self, start: int) -> Batches:
        """The endless stream from batch ``start`` on; :meth:`set_epoch` has no effect on it."""
        return self.between(start, None)

    def between(self, start: int, stop: int | None, then: Sequence[range] = ()) -> Batches:
        """The stream's batches ``start`` to ``stop``, or without end.

        Args:
            start: The number of the first one.
            stop: The number after the last one, or None.
            then: Those that will be asked for afterwards, pass by pass.
        """
        check_at_least(0, start=start)
        return self._batches(count(start) if stop is None else range(start, stop), then)

    def close(self) -> None:
        """End the work in the background and free the buffers. Open iterators raise an error from now on."""
        for ahead in list(self._running):
            ahead.close()
        self._kept = None
        self._source.close()

    def _batches(self, numbers: Iterable[int], then: Sequence[range] = ()) -> Batches:
        run = self._run_of(numbers, then)
        try:
            while run.left and (made := self._wait_for(run.ahead)):
                for _ in range(made[0]):
                    yield self._finished(run.taken(made[1]))  # the batch is not held here
                    run.ahead.check()
        finally:
            if run.left or not run.then:
                self._end(run)
            else:
                self._end(self._kept)  # of another iterator
                self._kept = run

    def _finished(self, batch: SampledData) -> SampledData:
        """Return a batch of the source as the loader yields it."""
        return in_type(batch, self._dtype)

    def _end(self, run: _Run | None) -> None:
        if run is not None:
            run.ahead.close()
            self._running.discard(run.ahead)

    def _run_of(self, numbers: Iterable[int], then: Sequence[range]) -> _Run:
        """Return what makes some batches in the background: what made those before, if it knew of these."""
        kept, self._kept = self._kept, None
        left = len(numbers) if isinstance(numbers, range) else math.inf
        if kept is not None and kept.then[0] == numbers and kept.ahead.is_open:
            kept.then, kept.left = kept.then[1:], left
            return kept
        self._end(kept)
        run = self._begun(numbers, then if self._source.is_remote and self._num_threads else (), left)
        self._running.add(run.ahead)
        return run

    def _begun(self, numbers: Iterable[int], then: Sequence[range], left: float) -> _Run:
        grows, depth = self._source.is_remote and self._num_threads > 0, lambda: self._source.depth(self._prefetch)
        chunks = chunks_of(numbers, self._bulk_size, grows=grows)
        if not self._source.is_remote:
            return _Run(Ahead(self._make, chunks, self._num_threads, depth), then, left)
        later = chain.from_iterable(chunks_of(more, self._bulk_size) for more in then)
        asked = map(self._asked, chain(chunks, later))
        return _Run(made_in_turn(self._source, asked, self._num_threads, depth), then, left)

    def _wait_for(self, ahead: Ahead[Any, MadeBulk]) -> MadeBulk | None:
        start = time.perf_counter()
        try:
            return ahead.next()
        finally:
            self.waited_seconds += time.perf_counter() - start

    def _make(self, numbers: list[int]) -> MadeBulk:
        """Make one bulk, a pure function of the numbers of its batches. Runs in several threads at once."""
        return len(numbers), self._source.make(*self._asked(numbers))

    def _asked(self, numbers: list[int]) -> BulkSeeds:
        deal, keys = self._deal, [self._deal.key(number) for number in numbers]
        places = [deal.places(key, self._source.order) for key in keys]
        inputs = None if deal.inputs is None else [deal.inputs[at] for at in places]
        return [deal.seeds[at] for at in places], keys, inputs


@dataclass
class _Run:
    """What makes the batches of a pass, and maybe of those after it.

    Attributes:
        ahead: Makes them in the background.
        then: The numbers of the batches that it will make, pass by pass.
        left: How many of the running pass are to be taken.
    """

    ahead: Ahead[Any, MadeBulk]
    then: Sequence[range]
    left: float

    def taken(self, made: Iterator[SampledData]) -> SampledData:
        batch = next(made)
        self.left -= 1
        return batch


class Ahead(Generic[Item, Result]):
    """Applies ``work`` to items ahead of their consumer, in order, on threads that end with it."""

    def __init__(
        self, work: Callable[[Item], Result | None], items: Iterator[Item], num_threads: int, depth: Callable[[], int]
    ) -> None:
        self._work, self._items, self._depth = work, items, depth
        self._threads = ThreadPoolExecutor(num_threads, THREAD_NAME) if num_threads else None
        self._pending: deque[Future[Result | None]] = deque()
        self._closed, self._process = False, os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether this process may ask for more."""
        return not self._closed and self._process == os.getpid()

    def check(self) -> None:
        """Raise if this was closed, or made in another process."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._threads is not None and self._process != os.getpid():  # the threads stayed there
            raise RuntimeError(FORKED)

    def next(self) -> Result | None:
        """The next result, or None after the last."""
        self.check()
        if self._threads is None:
            return next(map(self._work, self._items), None)
        self.begin()
        try:
            return self._pending.popleft().result() if self._pending else None
        except CancelledError as error:  # by close() in another thread
            raise RuntimeError(CLOSED) from error

    def begin(self) -> None:
        """Begin the item that is consumed next, and `depth` ahead of it. Without threads nothing is begun."""
        if self._threads is not None:
            for item in islice(self._items, max(0, self._depth() + 1 - len(self._pending))):
                self._pending.append(self._threads.submit(self._work, item))

    def close(self) -> None:
        """Cancel work that has not begun, and wait for the rest. Raises nothing, as an exception may be under way."""
        self._closed = True
        self._pending.clear()
        if self._threads is not None:
            # A worker cannot wait for itself: its garbage collection may find an abandoned iterator.
            is_worker = threading.current_thread().name.startswith(THREAD_NAME)
            self._threads.shutdown(wait=not is_worker, cancel_futures=True)


def made_in_turn(
    source: BatchSource, bulks: Iterator[BulkSeeds], num_threads: int, depth: Callable[[], int]
) -> Ahead[Any, MadeBulk]:
    """What a source makes of one bulk after the other, ahead of the consumer."""
    made = source.make_in_turn(bulks)
    return Ahead(lambda _: next(made, None), repeat(None), num_threads, depth)


def chunks_of(numbers: Iterable[int], size: int, *, grows: bool = False) -> Iterator[list[int]]:
    """Divide numbers into chunks of a size. If it ``grows`` to that from 1, the first ones are made sooner."""
    iterator, sizes = iter(numbers), (min(size, 1 << i) if grows else size for i in count())
    while chunk := list(islice(iterator, next(sizes))):
        yield chunk


def batches_of_ranks(count: int, num_ranks: int, batch_size: int) -> int:
    """Batches per rank for ``count`` seeds: equally many, as modules may exchange in each, and none empty."""
    most, least = -(-count // num_ranks), count // num_ranks
    return min(-(-most // batch_size), least)
