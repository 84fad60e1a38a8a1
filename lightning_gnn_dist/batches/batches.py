"""Makes batches ahead of the training: the next bulk is made while this one is consumed.

Also batches of the whole graph for every rank, which correct the replicas after they trained on parts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, repeat
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, device_of_batch, in_type
from lightning_gnn_dist.batches.source import BatchSource, BulkSeeds, MadeBulk
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.engine.sample import BatchKey

THREAD_NAME = "lightning_gnn_dist.batches.batches"
CLOSED = "The loader was closed while it was iterated over. Iterate over it anew."
FORKED = "This iterator belongs to the process that this one was forked from. Iterate over the loader anew."
_PASSES = 1 << 20  # more than a round has passes, so that every pass of every round has its own number

Made = Generator[SampledData, None, None]

Order = Callable[[Tensor, int, int], Tensor | None]


class NoSeedsError(ValueError):
    """There are no seeds to make batches of."""


@dataclass(eq=False)
class Deal:
    """Deals every seed to one of the batches of a pass, of nearly equal sizes, in another order every pass.

    With fewer seeds than batches, every batch gets one seed, and seeds repeat.

    Args:
        seeds: Distinct ids of nodes, or what else a source takes as seeds, int64.
        num_batches: Batches per pass.
        seed: Decides the orders, and what is drawn around the seeds.
        shuffle: Whether orders change; otherwise seeds stand in the order given.
        inputs: A number for each seed, that batches hold as ``input_id``. Default: they hold none.
    """

    seeds: Tensor
    num_batches: int
    seed: int
    shuffle: bool = True
    inputs: Tensor | None = None
    _orders: dict[int, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.seeds.numel() == 0:
            raise NoSeedsError("There are no seeds to make batches of: is the mask that marks them all false?")

    def key(self, number: int) -> BatchKey:
        """Return the key of a batch of the stream."""
        epoch, batch = divmod(number, self.num_batches)
        return BatchKey(self.seed, epoch, batch)

    def places(self, key: BatchKey, order_of: Order) -> Tensor | slice:
        """Return where the seeds of a batch stand among all; ``order_of`` may choose the order of a pass."""
        count = self.seeds.numel()
        begin, is_short = key.batch % count, count < self.num_batches
        places = slice(begin, begin + 1) if is_short else slice_of(count, self.num_batches, key.batch)
        if not self.shuffle:
            return places
        order = self._orders.get(key.epoch)
        if order is None:
            order = order_of(self.seeds, self.seed, key.epoch)
            order = permutation(count, self.seed, key.epoch) if order is None else order
            # Kept for two passes, as a bulk may span both. Two threads may compute the same order.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - key.epoch) == 1} | {key.epoch: order}
        return order[places]


def slice_of(count: int, num_slices: int, number: int) -> slice:
    """Where slice ``number`` lies if ``count`` things are cut into slices of nearly equal length."""
    return slice(number * count // num_slices, (number + 1) * count // num_slices)


class Learning(NamedTuple):
    """What the batches of a phase are made of.

    Attributes:
        source: Makes them.
        deal: Deals it their seeds.
    """

    source: BatchSource
    deal: Deal


class Batches:
    """The batches of a run, numbered from 0: pass by pass, or as an endless stream, over parts that change.

    A pass deals every seed to exactly one batch, of nearly equal size, because ranks that must take the same number
    of steps ask for the same number of batches. Batch ``t`` is batch ``t % num_batches`` of its pass over the part of
    its phase, and it is the same whatever the bulk size, the threads and the look-ahead. So a run that is resumed sets
    ``position``, and has nothing else to restore.

    Iterating starts nothing before the first batch is asked for, and no thread outlives its iterator. Beside the
    batches that the user keeps, at most ``(num_threads + 2) * bulk_size + 1`` exist at a time, and as many buffers for
    each large array. If a source sends batches to a device, at most ``num_threads + 4`` of those made on the CPU are on
    it, and all of those made there. A source may decide otherwise on how many bulks are made ahead.

    Args:
        learning_of: Returns what the batches of a phase are made of.
        num_batches: Batches in a pass over a part.
        every: Passes over a part in a phase. None: the part never changes.
        turns: Phases in a pass over all parts, one after the other.
        bulk_size: Batches that are made together.
        num_threads: Threads that make batches in the background, at most one where other ranks are asked: a bulk for
            each of them and one more, ahead of the one that is consumed. With 0 a bulk is made when it is due.
        num_ranks: The number of ranks that they are made for; strategies refuse to run on another number.
        dtype: The type of all floating point numbers. Default: as the source makes them.
        weigh: Give weight 0 to batches that repeat seeds, as a part has fewer than a pass has batches; with ``"batch"``
            all nodes of another one get the mean coverage of its seeds. Default: leave weights alone.
        num_used: Returns how many batches of a pass a trainer takes, infinity without a limit.
        overfits: Whether every pass repeats the first one.

    Attributes:
        position: The number of the batch that the next iteration begins with.
    """

    batch_sampler = None  # Lightning reads this of any loader that has a sampler

    def __init__(
        self,
        learning_of: Callable[[int], Learning],
        num_batches: int,
        *,
        every: int | None = None,
        turns: int = 1,
        bulk_size: int = 2,
        num_threads: int = 1,
        num_ranks: int = 1,
        dtype: torch.dtype | None = None,
        weigh: Literal["node", "batch"] | None = None,
        num_used: Callable[[], float] = lambda: math.inf,
        overfits: bool = False,
    ) -> None:
        self._learning_of, self._num_batches, self._every, self._turns = learning_of, num_batches, every, turns
        self._bulk_size, self._num_threads, self._prefetch = bulk_size, num_threads, num_threads + 1
        self._dtype, self._weigh, self._num_used, self._overfits = dtype, weigh, num_used, overfits
        self._learning: tuple[int, Learning] | None = None
        self._runs = list[Ahead]()  # that make batches
        self._done = 0  # batches of the running pass
        self._began: float | None = None
        self.num_ranks, self.position = num_ranks, 0
        self.waited_seconds = 0.0  # how long the consumer has waited for batches, since this was made

    def __len__(self) -> int:
        return self._num_batches * self._turns

    @property
    def num_seeds(self) -> int:
        """The training nodes, or edges, of the rank in the running phase."""
        return self.learning(self._learning[0] if self._learning else 0).deal.seeds.numel()

    @property
    def waited_share(self) -> float:
        """The share of ``waited_seconds`` in the time since the first batch was asked for."""
        return self.waited_seconds / (time.perf_counter() - self._began) if self._began is not None else 0.0

    @property
    def sampler(self) -> Batches:
        """These batches: Lightning calls ``loader.sampler.set_epoch``, never ``loader.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Give the next pass its number. Without this, passes count from 0."""
        self.position = epoch * len(self) + self.position % len(self)

    def state_dict(self) -> dict[str, int]:
        """Return how many batches of the pass are done; 0 at its end, where the next pass begins."""
        is_over = self._done >= min(len(self), self._num_used())
        done = {"batches_done": 0 if is_over else self._done}
        return done if self._turns == 1 else done | {"num_ranks": self.num_ranks, "turns": self._turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass at the batch of a checkpoint."""
        before, now = (state.get("num_ranks"), state.get("turns")), (self.num_ranks, self._turns)
        if state["batches_done"] and before not in (now, (None, None)):
            raise ValueError(
                f"In the checkpoint's epoch {before[0]} ranks go through the chunks in {before[1]} turns, and "
                f"{now[0]} ranks would in {now[1]}, in another order: resume with as many ranks and the same holding, "
                "or from a checkpoint of the end of an epoch."
            )
        self.position = self._done = int(state["batches_done"])

    def __iter__(self) -> Made:
        # A generator, so that all of this waits for the first batch to be asked for. Lightning creates
        # the iterator of its first epoch before it calls set_epoch, and of a resumed one too.
        self._done = self.position % len(self)
        begin = self.position - self._done
        self.position = begin + len(self)
        begin = 0 if self._overfits else begin
        for batch in self.stream(begin + self._done, begin + len(self)):
            self._done += 1
            yield batch

    def stream(self, start: int, stop: int | None = None) -> Made:
        """Yield batches from number ``start`` on, up to ``stop`` or without end, whatever ``position`` is."""
        at = start
        while at != stop:
            end = min((each for each in (stop, self.end_of_phase(at)) if each is not None), default=None)
            learning = self.learning(self.phase_of(at))
            run, deal = self._run_of(learning, at, end), learning.deal
            del learning  # the part may change before the iterator ends
            try:
                while at != end:
                    at += 1
                    yield self._next_of(run, deal, at - 1, is_last=at == end)  # the batch is not held here
            finally:
                self._end(run)

    def _run_of(self, learning: Learning, start: int, stop: int | None) -> Ahead:
        """Return what makes the batches of a phase from number ``start`` on, up to ``stop``, or without end."""
        self._began = time.perf_counter() if self._began is None else self._began
        source, prefetch = learning.source, self._prefetch
        num_threads = min(self._num_threads, source.depth(prefetch), *([1] if source.is_remote else []))
        numbers = count(start) if stop is None else range(start, stop)
        bulks = chunks_of(numbers, self._bulk_size, grows=source.is_remote and num_threads > 0)
        self._runs.append(Ahead(source, partial(asked_of, learning), bulks, num_threads, prefetch))
        return self._runs[-1]

    def move_to(self, number: int) -> None:
        """Make the phase of batch ``number`` the running one; all batches before it are taken."""
        before = self._learning[0] if self._learning else 0
        try:
            self.learning(self.phase_of(number))
        except NoSeedsError:  # maybe after the last round; if not, asking for the batch raises it again
            self.learning(before)

    def phase_of(self, number: int) -> int:
        """Return the phase of batch ``number``."""
        return 0 if self._every is None else number // self._num_batches // self._every

    def learning(self, phase: int) -> Learning:
        """Return what the batches of a phase are made of, which becomes the running one."""
        if self._learning is None or self._learning[0] != phase:
            if self._learning is not None:
                self.close()
            found = self._learning_of(phase)
            found.source.keep_buffers((self._prefetch + 1) * self._bulk_size + 1)
            self._learning = phase, found
        return self._learning[1]

    def close(self) -> None:
        """End the work in the background and free the buffers. Open iterators raise an error from now on."""
        for run in list(self._runs):
            self._end(run)
        if self._learning is not None:
            self._learning[1].source.close()
        self._learning = None

    def end_of_phase(self, number: int) -> int | None:
        """Return the number of the first batch of the phase after that of batch ``number``, None if it stays."""
        return None if self._every is None else (self.phase_of(number) + 1) * self._every * self._num_batches

    def _next_of(self, run: Ahead, deal: Deal, number: int, *, is_last: bool) -> SampledData:
        """Return the next batch as it is handed out, with its weights."""
        started = time.perf_counter()
        try:
            batch = run.next()
        finally:
            self.waited_seconds += time.perf_counter() - started
        if batch is None:  # it was closed from another thread, as there is one more
            raise RuntimeError(CLOSED)
        if is_last:  # already: move_to() may change the phase before more is asked for
            self._end(run)
        return self._finished(batch, deal, number)

    def _end(self, run: Ahead) -> None:
        run.close()
        self._runs = [each for each in self._runs if each is not run]

    def _finished(self, batch: SampledData, deal: Deal, number: int) -> SampledData:
        if self._dtype is not None:
            batch = in_type(batch, self._dtype)
        if self._weigh is not None and deal.key(number).batch >= deal.seeds.numel():
            # It has nothing of its own to learn.
            batch.is_filler = True
            batch.coverage = torch.zeros(batch.num_nodes, device=device_of_batch(batch))
        elif self._weigh == "batch":
            mean = batch.coverage[: batch.batch_size].mean()
            batch.coverage = mean.repeat(batch.num_nodes)  # a number would make the host wait for a device
        return batch


def asked_of(learning: Learning, numbers: list[int]) -> BulkSeeds:
    """Return what a source makes a bulk of, a pure function of the numbers of its batches."""
    source, deal = learning
    keys = [deal.key(number) for number in numbers]
    places = [deal.places(key, source.order) for key in keys]
    inputs = None if deal.inputs is None else [deal.inputs[at] for at in places]
    return [deal.seeds[at] for at in places], keys, inputs


class Ahead:
    """Makes bulks ahead of the consumer of their batches, in order, on threads that end with it.

    Args:
        source: Makes them.
        asked: Returns what a bulk of some numbers is made of.
        bulks: The numbers of each bulk.
        num_threads: How many threads; with 0 a bulk is made when it is due.
        prefetch: How many bulks are made ahead, as far as the source has room for them.
    """

    def __init__(
        self,
        source: BatchSource,
        asked: Callable[[list[int]], BulkSeeds],
        bulks: Iterator[list[int]],
        num_threads: int,
        prefetch: int,
    ) -> None:
        self._work: Callable[[Any], MadeBulk | None] = lambda bulk: (len(bulk), source.make(*asked(bulk)))
        self._items: Iterator[Any] = bulks
        if source.is_remote:  # one bulk after the other; otherwise several threads make some at once
            made = source.make_in_turn(map(asked, bulks))
            self._work, self._items = (lambda _: next(made, None)), repeat(None)
        self._depth: Callable[[], int] = partial(source.depth, prefetch)
        self._threads = ThreadPoolExecutor(num_threads, THREAD_NAME) if num_threads else None
        self._pending: deque[Future[MadeBulk | None]] = deque()
        self._closed, self._process = False, os.getpid()
        self._num_here, self._here = 0, iter(list[SampledData]())  # the rest of the bulk that was made last

    def next(self) -> SampledData | None:
        """The next batch, or None after the last. It raises if this was closed, or made in another process."""
        if self._closed:
            raise RuntimeError(CLOSED)
        if self._threads is not None and self._process != os.getpid():  # the threads stayed there
            raise RuntimeError(FORKED)
        if not self._num_here:
            if self._threads is not None:  # what is consumed next, and so many ahead of it
                for item in islice(self._items, max(0, self._depth() + 1 - len(self._pending))):
                    self._pending.append(self._threads.submit(self._work, item))
            try:
                made = self._pending.popleft().result() if self._pending else next(map(self._work, self._items), None)
            except CancelledError as error:  # by close() in another thread
                raise RuntimeError(CLOSED) from error
            if made is None:
                return None
            self._num_here, self._here = made
        self._num_here -= 1
        return next(self._here)

    def close(self) -> None:
        """Cancel work that has not begun, and wait for the rest. Raises nothing, as an exception may be under way."""
        self._closed = True
        self._work, self._items, self._depth = (lambda _: None), iter(()), (lambda: 0)  # nor what they need
        self._here = iter(())  # an open iterator does not hold the part
        self._pending.clear()
        if self._threads is not None:
            # A worker cannot wait for itself: its garbage collection may find an abandoned iterator.
            is_worker = threading.current_thread().name.startswith(THREAD_NAME)
            self._threads.shutdown(wait=not is_worker, cancel_futures=True)


def chunks_of(numbers: Iterable[int], size: int, *, grows: bool = False) -> Iterator[list[int]]:
    """Divide numbers into chunks of a size. If it ``grows`` to that from 1, the first ones are made sooner."""
    iterator, sizes = iter(numbers), (min(size, 1 << i) if grows else size for i in count())
    while chunk := list(islice(iterator, next(sizes))):
        yield chunk


def batches_of_ranks(count: int, num_ranks: int, batch_size: int) -> int:
    """Batches per rank for ``count`` seeds: equally many, as modules may exchange in each, and none empty."""
    most, least = -(-count // num_ranks), count // num_ranks
    return min(-(-most // batch_size), least)


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
