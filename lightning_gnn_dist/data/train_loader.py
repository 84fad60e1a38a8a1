"""The training loader of a rank, across super-epochs and their parts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_gnn_dist.batches.batch import SampledData, device_of_batch
from lightning_gnn_dist.batches.deal import NoSeedsError
from lightning_gnn_dist.batches.loader import Batches
from lightning_gnn_dist.boundary.boundary import PassLoader
from lightning_gnn_dist.graph.graph import Graph

log = logging.getLogger(__name__)

MOST_PASSES = 1000  # that are known ahead; the first bulk of the next one is waited for


class TrainLoader:
    """The training batches of one rank: pass by pass, or as a stream, over parts that change.

    Its ``state_dict()`` holds the batch at which it stands in a pass, so that a resumed fit goes on there.

    Args:
        part_at: Returns the part of a super-epoch.
        make_loader: Returns the loader of a part, given the part and ``num_batches``.
        num_batches: Batches in a pass over a part.
        every: Passes over a part in a super-epoch. None: the part never changes.
        turns: Parts in a pass, one after the other, each for a super-epoch.
        num_ranks: The number of ranks that it is made for.
        batch_level: Whether all nodes of a batch get the mean coverage of its seeds.
        num_used: Returns how many batches of a pass the trainer takes, infinity without a limit.
        overfits: Whether every pass repeats the first one.
        num_left: Returns how many passes will follow the one that begins, as far as it is known.
    """

    batch_sampler = None  # Lightning asks any loader that has a sampler for this too

    def __init__(
        self,
        part_at: Callable[[int], Graph],
        make_loader: Callable[[Graph, int], PassLoader],
        num_batches: int,
        *,
        every: int | None,
        num_ranks: int,
        turns: int = 1,
        batch_level: bool = False,
        num_used: Callable[[], float] = lambda: math.inf,
        overfits: bool = False,
        num_left: Callable[[], float] = lambda: 0,
    ) -> None:
        self._part_at, self._make_loader = part_at, make_loader
        self._num_batches, self._every, self._turns, self._num_used = num_batches, every, turns, num_used
        self._batch_level, self._overfits, self._num_left = batch_level, overfits, num_left
        self._running: tuple[int, PassLoader] | None = None
        self._next_pass = self._skipped = self._done = 0
        self._waited_before = 0.0
        self._began: float | None = None
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return self._num_batches * self._turns

    @property
    def num_seeds(self) -> int:
        """The training nodes, or edges, of the rank in the running super-epoch."""
        return self._loader(self._running[0] if self._running else 0).num_seeds

    @property
    def waited_seconds(self) -> float:
        """Seconds that the consumer has waited for batches since the loader was made."""
        return self._waited_before + (self._running[1].waited_seconds if self._running else 0.0)

    @property
    def waited_share(self) -> float:
        """The share of ``waited_seconds`` in the time since the first batch was asked for."""
        return self.waited_seconds / (time.perf_counter() - self._began) if self._began is not None else 0.0

    @property
    def sampler(self) -> TrainLoader:
        """The loader itself: Lightning calls ``loader.sampler.set_epoch``, never ``loader.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Give the next pass its number. Without this, passes count from 0."""
        self._next_pass = epoch

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
        self._skipped = self._done = int(state["batches_done"])

    def __iter__(self) -> Batches:
        # A generator, so that all of this waits for the first batch to be asked for. Lightning creates
        # the iterator of its first epoch before it calls set_epoch, and of a resumed one too.
        begin, skipped = 0 if self._overfits else self._next_pass * len(self), self._skipped
        self._next_pass, self._skipped, self._done = self._next_pass + 1, 0, skipped
        start, stop = begin + skipped, begin + len(self)
        while start < stop:
            end = self._end_of_part(start)
            end = stop if end is None else min(stop, end)
            for batch in self._between(start, end, self._passes_after(begin)):
                self._done += 1
                yield batch
            start = end

    def stream(self, start: int) -> Batches:
        """Yield batches without end, from number ``start`` of the run; ``set_epoch`` has no effect here."""
        while True:
            stop = self._end_of_part(start)
            yield from self._between(start, stop)
            assert stop is not None
            start = stop

    def move_to(self, number: int) -> None:
        """Make the part of batch ``number`` of the stream the running one; all batches before it are taken."""
        before = self._running[0] if self._running else 0
        try:
            self._loader(self.super_epoch(number))
        except NoSeedsError:  # maybe after the last round; if not, asking for the batch raises it again
            self._loader(before)

    def close(self) -> None:
        """End what runs in the background and free the buffers."""
        if self._running is not None:
            self._waited_before = self.waited_seconds
            self._running[1].close()
        self._running = None

    def _passes_after(self, begin: int) -> list[range]:
        """Return the numbers of the batches of the passes that will follow, as long as the part stays the same."""
        if self._overfits or self._num_used() < len(self):
            return []
        size, left = len(self), int(min(self._num_left(), MOST_PASSES))
        if self._every is not None:
            left = min(left, self._every - 1 - begin // size % self._every)
        return [range(begin + number * size, begin + (number + 1) * size) for number in range(1, left + 1)]

    def _between(self, start: int, stop: int | None, then: Sequence[range] = ()) -> Batches:
        self._began = time.perf_counter() if self._began is None else self._began
        loader = self._loader(self.super_epoch(start))
        batches = loader.between(start, stop, then)
        del loader  # or the part before would be held here after a switch
        for number, batch in enumerate(batches, start):
            if number + 1 == stop:
                batches.close()  # at the last one already: move_to() may close the loader before more is asked for
            yield self._weigh(batch, number)

    def _loader(self, super_epoch: int) -> PassLoader:
        if self._running is None or self._running[0] != super_epoch:
            self.close()
            self._running = super_epoch, self._make_loader(self._part_at(super_epoch), self._num_batches)
        return self._running[1]

    def super_epoch(self, number: int) -> int:
        """Return the super-epoch of batch ``number`` of the stream."""
        return 0 if self._every is None else number // self._num_batches // self._every

    def _end_of_part(self, number: int) -> int | None:
        """Return the number of the first batch of the part after that of batch ``number``, None if it stays."""
        return None if self._every is None else (self.super_epoch(number) + 1) * self._every * self._num_batches

    def _weigh(self, batch: SampledData, number: int) -> SampledData:
        """Return the batch with its weights. A part with fewer seeds than batches repeats some, with weight 0."""
        assert self._running is not None
        loader = self._running[1]
        if loader.repeats(number):
            batch.is_filler = True
            batch.coverage = torch.zeros(batch.num_nodes, device=device_of_batch(batch))
        elif self._batch_level:
            mean = batch.coverage[: batch.batch_size].mean()
            batch.coverage = mean.repeat(batch.num_nodes)  # a number would make the host wait for a device
        return batch


def passes_left(trainer: Trainer | None, num_batches: int = 1) -> float:
    """Return how many passes, or rounds, of so many batches at least a trainer begins later, if nothing stops it."""
    if trainer is None or not trainer.training or trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        return 0
    left = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        left = trainer.max_epochs - trainer.current_epoch - 1
    if trainer.max_steps >= 0:
        steps = -(-num_batches // trainer.accumulate_grad_batches)
        left = min(left, -(-(trainer.max_steps - trainer.global_step) // steps) - 1)
    return max(0, left)
