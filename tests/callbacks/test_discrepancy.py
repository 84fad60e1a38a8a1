"""The probe tells parts that look alike from parts that do not."""

import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest

import lightning_gnn_dist as lgd
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import data_module, fit, model, small_graph


def measure(rank: int, world_size: int, partitioner: Any, probe: bool) -> tuple[float, float, State]:
    module = model(dropout=0.4)
    callbacks: list[pl.Callback] = [lgd.DiscrepancyProbe(every_n_rounds=2)] if probe else []
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(3), **PATIENCE)
    trainer = fit(strategy, module, data_module(partitioner=partitioner), world_size, callbacks=callbacks, max_epochs=2)
    found = [float(trainer.callback_metrics.get(f"round/discrepancy{end}", -1)) for end in ("", "_worst")]
    return found[0], found[1], state_of(module)


@pytest.mark.slow
def test_parts_that_look_alike_disagree_less_and_measuring_changes_nothing() -> None:
    (metis, worst, state), *_ = run_ranks(measure, 3, lgd.MetisPartitioner(), True)
    (dealt, _, _), *_ = run_ranks(measure, 3, lgd.RandomPartitioner(), True)
    (nothing, _, plain), *_ = run_ranks(measure, 3, lgd.MetisPartitioner(), False)
    assert nothing == -1
    assert 0 < dealt < metis <= worst
    assert differs(state, plain) == 0.0


def alone(rank: int, world_size: int) -> float:
    return measure(rank, world_size, lgd.MetisPartitioner(), True)[0]


def test_one_rank_is_the_whole_graph_up_to_sampling() -> None:
    assert run_ranks(alone, 1)[0] < 0.5


class Counted(lgd.PartitionedDataModule):
    """Knows how many batches of its part are in memory, and which of the graph were asked for."""

    alive: ClassVar[list[Any]] = []
    most: ClassVar[list[int]] = []
    stops: ClassVar[list[int]] = []

    def anchor_batches(self, *args: Any, **options: Any) -> Iterator[Any]:
        for batch in super().anchor_batches(*args, **options):
            self.alive.append(weakref.ref(batch))
            self.most.append(sum(reference() is not None for reference in self.alive))
            yield batch

    def correction_batches(self, round_idx: int, *, stop: int | None = None, **options: Any) -> Iterator[Any]:
        self.stops.append(stop or 0)
        return super().correction_batches(round_idx, stop=stop, **options)


@pytest.mark.parametrize("steps", [None, 4])
def test_it_holds_one_batch_after_another(steps: int | None) -> None:
    for found in (Counted.alive, Counted.most, Counted.stops):
        found.clear()
    data = Counted(
        small_graph(), sampler=lgd.NeighborSampler([4, 4]), batch_size=8, evaluation=lgd.Evaluation(batch_size=100)
    )
    fit(lgd.LocalSGDStrategy(**PATIENCE), model(), data, 1, callbacks=[lgd.DiscrepancyProbe(steps=steps)], max_epochs=1)
    count = steps or -(-int(small_graph().split("train").numel()) // 8)
    assert len(Counted.alive) == count and Counted.stops == [count]
    assert max(Counted.most) <= 3


def test_it_needs_a_strategy_with_meetings() -> None:
    with pytest.raises(ValueError, match="measures at meetings, and SingleDeviceStrategy has none"):
        fit("auto", model(), data_module(), 1, callbacks=[lgd.DiscrepancyProbe()])


# The time that training waits for data is logged, whatever the strategy.
