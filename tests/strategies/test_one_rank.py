"""Law 6: on one rank every strategy is plain Lightning, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.every_strategy import PATIENCE, every_strategy
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, hear, state_of
from tests.strategies.graph_fitting import Batched, data_module, fit, model, small_graph

# A pass has ten steps.
MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: SingleDeviceStrategy(torch.device("cpu")),
    "grappa": lambda: lgd.GrappaStrategy(**PATIENCE),
    "local_sgd": lambda: lgd.LocalSGDStrategy(**PATIENCE),
    "local_sgd of equal weights": lambda: lgd.LocalSGDStrategy(lgd.EverySteps(10), weights="uniform", **PATIENCE),
    "tma": lambda: lgd.TMAStrategy(lgd.EverySteps(10), **PATIENCE),
    "llcg": lambda: lgd.LLCGStrategy(**PATIENCE),
    "llcg with drift of ranks": lambda: lgd.LLCGStrategy(drift=lgd.Drift("ranks"), buffers="global", **PATIENCE),
}


def alone(rank: int, world_size: int) -> dict[str, State]:
    found = {}
    for name, make in MADE.items():
        module = model(Batched, dropout=0.5)
        torch.manual_seed(1)
        fit(make(), module, data_module(), 1, gradient_clip_val=0.5)
        found[name] = state_of(module)
    return found


def test_it_is_plain_lightning() -> None:
    (states,) = run_ranks(alone, 1)
    assert {name: differs(state, states["plain"]) for name, state in states.items()} == dict.fromkeys(MADE, 0.0)


# Statistics of batch normalisation: those of the whole graph, and those that stay as they are.


def statistics(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, float | None]]:
    found = []
    for buffers in ("global", "average"):
        module = model(Batched, dropout=0.5)
        options: dict[str, Any] = {"buffers": buffers, "drift": lgd.Drift("global", anchor_steps=1)}
        strategy = lgd.LLCGStrategy(lgd.EverySteps(3), **options, **PATIENCE)
        everything = lgd.GlobalBatching(batch_size=10**6, sampler=lgd.NeighborSampler([-1, -1]))
        data = data_module(partitioner=lgd.MetisPartitioner(), global_batching=everything)
        fit(strategy, module, data, world_size)
        found.append((module.norm.running_mean, module.norm.running_var, module.norm.momentum))
    return found


def test_global_statistics_are_those_of_the_whole_graph() -> None:
    x = small_graph().node_arrays["x"]
    for (mean, var, momentum), (average, *_) in run_ranks(statistics, 2):
        # Every node with an edge is in the neighbourhood of a training node, on one rank or on both.
        assert (mean - x.mean(0)).abs().max() < 0.5 * (average - x.mean(0)).abs().max()
        assert (var / x.var(0) - 1).abs().max() < 0.3
        assert momentum == 0.1


def statistics_of_one_seed(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    module = model(Batched)
    strategy = lgd.LLCGStrategy.as_published(lgd.EverySteps(2), buffers="global", correction=None, **PATIENCE)
    data = data_module(global_batching=lgd.GlobalBatching(batch_size=1))
    fit(strategy, module, data, world_size, max_epochs=1, limit_val_batches=0)
    seen = torch.stack([batch.x.mean(0) for batch in data.correction_batches(0, sliced=False, stop=4)])
    return module.norm.running_mean, seen.mean(0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_without_seeds_adds_nothing_to_the_statistics() -> None:
    for mean, expected in run_ranks(statistics_of_one_seed, 2):
        assert (mean - expected).abs().max() < 1e-5


# A fit that averages alone over parts which cannot be averaged says so, once, and what to do.


UNLIKE = {"homophily": 1.0, "mean_degree": 20.0}  # METIS gives every part classes of its own
SPARSE = {"homophily": 0.5, "mean_degree": 2.0}
ONE_STEP = lgd.EverySteps(1)
AVERAGES: dict[str, Any] = {"clock": ONE_STEP, **PATIENCE}
CASES: list[tuple[dict[str, float], dict[str, Any], Any, str]] = [
    (UNLIKE, {"partitioner": lgd.MetisPartitioner()}, lgd.LocalSGDStrategy(**AVERAGES), "different labels"),
    (UNLIKE, {"partitioner": lgd.MetisPartitioner()}, lgd.LocalSGDStrategy(**AVERAGES, drift=lgd.Drift()), ""),
    (
        UNLIKE,
        {"partitioner": lgd.MetisPartitioner(), "holding": lgd.Holding(lgd.Redeal(8))},
        lgd.LocalSGDStrategy(**AVERAGES),
        "",
    ),
    (UNLIKE, {"partitioner": lgd.SuperNodePartitioner(100)}, lgd.LocalSGDStrategy(**AVERAGES), ""),
    (SPARSE, {"partitioner": lgd.RandomPartitioner()}, lgd.LocalSGDStrategy(**AVERAGES), "lost all their neighbours"),
]


def said(rank: int, world_size: int) -> list[list[str]]:
    """What every fit says of averaging."""
    lines, found = hear(), []
    for shape, options, strategy, _ in CASES:
        graph = lgd.communities(600, 4, num_features=12, train_share=0.3, seed=3, **shape)  # type: ignore[arg-type]
        settings = {"sampler": lgd.NeighborSampler([4, 4]), "boundary": lgd.Isolated()} | options
        data = lgd.PartitionedDataModule(graph, **settings)  # type: ignore[arg-type]
        lines.clear()
        fit(strategy, model(), data, world_size, max_epochs=1, limit_val_batches=0)
        found.append([line for line in lines if "veraging alone" in line])
    return found


@pytest.mark.slow
def test_a_fit_that_averages_unlike_parts_says_so() -> None:
    of_rank_0, of_rank_1 = run_ranks(said, 2)
    for lines, (_, options, strategy, reason) in zip(of_rank_0, CASES, strict=True):
        assert len(lines) == bool(reason) and all(reason in line for line in lines), (options, type(strategy), lines)
    assert "SuperNodePartitioner()" in of_rank_0[0][0]
    assert not any(of_rank_1)


# Lightning's searches before a fit leave no trace in it.


STRATEGIES = every_strategy(2) | {
    "outer": lambda: lgd.LocalSGDStrategy(lgd.EverySteps(2), outer=lgd.Outer.diloco(), **PATIENCE)
}


def searched(rank: int, world_size: int, folder: str, strategies: Any = None) -> dict[str, tuple[State, State, int]]:
    found = {}
    for name, strategy in (strategies or STRATEGIES).items():
        states, finder = [], LearningRateFinder(num_training_steps=4, update_attr=False)
        for callbacks in ([], [finder]):
            module = model(Batched)
            options: dict[str, Any] = {"callbacks": callbacks, "limit_val_batches": 0, "default_root_dir": folder}
            fit(strategy(), module, data_module(), world_size, **options)
            states.append(state_of(module))
        found[name] = states[0], states[1], len(finder.optimal_lr.results["lr"])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_fit_after_a_search_of_the_rate_is_the_fit_without(tmp_path: Any) -> None:
    for of_rank in run_ranks(searched, 2, str(tmp_path)):
        for plain, after, num_rates in of_rank.values():
            assert differs(plain, after) == 0.0 and num_rates >= 4
