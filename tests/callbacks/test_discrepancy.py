"""The probe tells parts that look alike from parts that do not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.rounds import EverySteps
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.test_llcg import PATIENCE, data_module, fit, model


def measure(rank: int, world_size: int, partitioner: Any, probe: bool) -> tuple[float, float, State]:
    module = model(dropout=0.4)
    callbacks: list[pl.Callback] = [DiscrepancyProbe(every_n_rounds=2)] if probe else []
    strategy = LocalSGDStrategy(EverySteps(3), **PATIENCE)
    trainer = fit(strategy, module, data_module(partitioner=partitioner), world_size, callbacks=callbacks, max_epochs=2)
    found = [float(trainer.callback_metrics.get(f"round/discrepancy{end}", -1)) for end in ("", "_worst")]
    return found[0], found[1], state_of(module)


def test_parts_that_look_alike_disagree_less_and_measuring_changes_nothing() -> None:
    (metis, worst, state), *_ = run_ranks(measure, 3, MetisPartitioner(), True)
    (dealt, _, _), *_ = run_ranks(measure, 3, RandomPartitioner(), True)
    (nothing, _, plain), *_ = run_ranks(measure, 3, MetisPartitioner(), False)
    assert nothing == -1
    assert 0 < dealt < metis <= worst
    assert differs(state, plain) == 0.0


def alone(rank: int, world_size: int) -> float:
    return measure(rank, world_size, MetisPartitioner(), True)[0]


def test_one_rank_is_the_whole_graph_up_to_sampling() -> None:
    assert run_ranks(alone, 1)[0] < 0.5


def test_it_needs_a_strategy_with_meetings() -> None:
    with pytest.raises(ValueError, match="measures at meetings, and SingleDeviceStrategy has none"):
        fit("auto", model(), data_module(), 1, callbacks=[DiscrepancyProbe()])
    with pytest.raises(ValueError, match="every_n_rounds must be an integer of at least 1, got 0"):
        DiscrepancyProbe(every_n_rounds=0)
