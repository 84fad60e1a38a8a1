"""Law 6: on one rank every strategy is plain Lightning, to the bit."""

from collections.abc import Callable
from typing import Any

import lightning.fabric.accelerators.mps as of_fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import stream_to
from lightning_gnn_dist.rounds import meeting
from lightning_gnn_dist.wire import alike, collectives
from tests.every_strategy import PATIENCE, every_strategy
from tests.layers.typed_model import some_data
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, hear, same_start, state_of
from tests.strategies.fitting import fit as fit_net
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


def behind_a_fit_on_two_hosts(rank: int, world_size: int) -> list[object]:
    found = []
    for make in (MADE["grappa"], MADE["local_sgd"]):
        collectives.hosts = object()
        fit(make(), model(Batched), data_module(), 1)
        found.append(collectives.hosts)
    return found


def test_it_forgets_the_hosts_of_a_fit_before() -> None:
    assert run_ranks(behind_a_fit_on_two_hosts, 1) == [[None, None]]


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


def test_a_rank_without_seeds_adds_nothing_to_the_statistics() -> None:
    for mean, expected in run_ranks(statistics_of_one_seed, 2):
        assert (mean - expected).abs().max() < 1e-5


# A fit that averages alone over parts which cannot be averaged says so, once, and what to do.


UNLIKE = {"homophily": 1.0, "mean_degree": 20.0}  # METIS gives every part classes of its own
SPARSE = {"homophily": 0.5, "mean_degree": 2.0}
ONE_STEP = lgd.EverySteps(1)
METIS: dict[str, Any] = {"partitioner": lgd.MetisPartitioner()}
AVERAGES: dict[str, Any] = {"clock": ONE_STEP, **PATIENCE}
CASES: list[tuple[dict[str, float], dict[str, Any], Any, str]] = [
    (UNLIKE, METIS, lgd.LocalSGDStrategy(**AVERAGES), "different labels"),
    (UNLIKE, METIS, lgd.LocalSGDStrategy(**AVERAGES, drift=lgd.Drift()), ""),
    (UNLIKE, METIS | {"holding": lgd.Holding(lgd.Redeal(8))}, lgd.LocalSGDStrategy(**AVERAGES), ""),
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
def test_a_fit_after_a_search_of_the_rate_is_the_fit_without(tmp_path: Any) -> None:
    for of_rank in run_ranks(searched, 2, str(tmp_path)):
        for plain, after, num_rates in of_rank.values():
            assert differs(plain, after) == 0.0 and num_rates >= 4


# Accelerators that are neither CPU nor CUDA: strategies refuse them before ranks start; one process moves batches.


DEVICES = ["mps", "xpu", "hpu", "xla"]
WAY_OUT = "accelerator=.cpu."


def of_kind(kind: str) -> CPUAccelerator:
    """One that finds devices of another kind."""

    class Other(CPUAccelerator):
        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(kind, 0)] * int(devices)

    return Other()


@pytest.fixture
def a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (MPSAccelerator, of_fabric.MPSAccelerator):
        monkeypatch.setattr(kind, "is_available", staticmethod(lambda: True))


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "mps"])
@pytest.mark.parametrize("name", every_strategy())
def test_strategies_are_refused_on_a_mac(name: str, accelerator: str, a_mac: None) -> None:
    for strategy in (every_strategy()[name](), name):
        with pytest.raises(ValueError, match=WAY_OUT):
            pl.Trainer(accelerator=accelerator, devices=1, strategy=strategy, logger=False)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", every_strategy())
def test_strategies_name_the_device_that_they_refuse(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"Strategy trains on CPUs and on CUDA devices.* on {kind}: .*{WAY_OUT}"):
        pl.Trainer(accelerator=of_kind(kind), devices=2, strategy=every_strategy()[name](), logger=False)


def test_a_mac_without_a_strategy_is_not_refused(a_mac: None) -> None:
    assert pl.Trainer(accelerator="auto", devices=1, logger=False).strategy.root_device == torch.device("mps", 0)


SAMPLERS = [lgd.NeighborSampler([3, 3]), lgd.LadiesSampler([20, 20]), lgd.WholePartSampler(2)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("is_typed", [False, True], ids=["plain", "typed"])
def test_batches_are_moved_whole_and_hold_no_number_that_such_a_device_lacks(sampler: Any, is_typed: bool) -> None:
    if is_typed and isinstance(sampler, lgd.LadiesSampler):
        pytest.skip("draws from graphs without types")
    graph: Any = lgd.communities(200, 3, num_features=5)
    if is_typed:
        graph = some_data()
        graph.apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=40)
    for stage in ("fit", "test"):
        data.setup(stage)
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for batch in loader:
            moved, held = batch.to("meta"), list[Any]()
            moved.apply_(held.append)
            found = [each for each in held if isinstance(each, Tensor)]
            assert {tensor.device.type for tensor in found} == {"meta"}
            assert torch.float64 not in {tensor.dtype for tensor in found}


def test_nothing_of_cuda_is_asked_of_such_a_device() -> None:
    assert stream_to(torch.device("mps", 0)) is None


# Ranks on processors of different kinds, whose results differ in the last digits, have equal replicas all the same.


class Computes(lgd.LocalSGDStrategy):
    """What each rank computes for itself at a meeting comes out differently, by so much."""

    def __init__(self, error: float) -> None:
        super().__init__(lgd.EverySteps(3), average_optimizer=True, **PATIENCE)
        self.error = error

    def end_round(self) -> None:
        super().end_round()
        for parameter in self._module().parameters():
            parameter.data *= 1 + self.error * self.global_rank


def train(rank: int, world_size: int, error: float, processors: list[int]) -> tuple[State, list[str]]:
    alike.processor_of = lambda device: processors[rank]
    said: list[str] = []
    meeting.rank_zero_info = said.append
    module = same_start(optimizer="Adam", batch_norm=True)
    fit_net(rank, Computes(error), module, devices=world_size)
    return state_of(module), [line for line in said if "processors" in line]


def test_replicas_that_differ_in_the_last_digits_are_those_of_rank_0() -> None:
    by_rank_0 = run_ranks(train, 2, 0.0, [1, 1])[0][0]
    outcomes = run_ranks(train, 2, 1e-6, [1, 2])
    assert [differs(state, by_rank_0) for state, _ in outcomes] == [0.0, 0.0]
    assert len(outcomes[0][1]) == 1 and "all take rank 0's" in outcomes[0][1][0]


@pytest.mark.parametrize(("error", "processors"), [(0.1, [1, 2]), (1e-6, [1, 1])])
def test_what_processors_do_not_explain_is_refused(error: float, processors: list[int]) -> None:
    message = r"replicas of ranks \[1\] differ from that of rank 0, by more than processors of different kinds explain"
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(train, 2, error, processors)
    assert set(caught.value.failures) == {0, 1}
