"""Laws of LLCG, on several gloo ranks and real parts."""

import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.strategies import llcg
from lightning_gnn_dist.strategies.correction import CorrectionSteps, StepsOnRank0
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import Net, State, batches, differs, state_of
from tests.strategies.graph_fitting import Batched, Remembering, data_module, fit, model

# Law 2: nothing to correct is local SGD.


def without_correction(rank: int, world_size: int) -> tuple[State, State]:
    states = []
    for strategy in (lgd.LocalSGDStrategy, lgd.LLCGStrategy):
        plain = {"correction": None, "drift": None, "average_optimizer": False, "outer": None}
        options = {"weights": "nodes"} | ({} if strategy is lgd.LocalSGDStrategy else plain)
        module = model(dropout=0.3)
        torch.manual_seed(rank)
        fit(strategy(lgd.EverySteps(3), **PATIENCE, **options), module, data_module(), world_size)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.slow
def test_llcg_without_correction_is_local_sgd() -> None:
    for local, corrected in run_ranks(without_correction, 2):
        assert differs(local, corrected) == 0.0


# Law 3: slices of a global batch give the gradient of the whole batch.


def corrected(rank: int, world_size: int, settings: list[tuple[str, int]]) -> list[State]:
    states = []
    for way, correction_batch_size in settings:
        correction = lgd.Correction.as_published(3, way)  # type: ignore[arg-type]
        strategy = lgd.LLCGStrategy.as_published(lgd.EverySteps(2), correction=correction, **PATIENCE)
        everything = lgd.NeighborSampler([-1, -1])
        data = data_module(global_batching=lgd.GlobalBatching(batch_size=correction_batch_size, sampler=everything))
        module = model()
        fit(strategy, module, data, world_size, max_epochs=2)
        states.append(state_of(module))
    return states


@pytest.mark.parametrize(
    "correction_batch_size", [pytest.param(7, marks=pytest.mark.slow), 2], ids=["uneven", "a rank idles"]
)
def test_sliced_correction_is_the_single_servers(correction_batch_size: int) -> None:
    settings = [("sliced", correction_batch_size), ("rank0", correction_batch_size), ("sliced", 20)]
    for sliced, on_rank0, of_another_size in run_ranks(corrected, 3, settings):
        # Adam divides by the gradient's own size, so 1e-6 of a gradient may be more of a weight.
        assert differs(sliced, on_rank0) < 2e-5
        assert differs(sliced, of_another_size) > 1e-3


# Law 4: replicas stay equal, with everything that could drive them apart.


REPLICAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({"correction": lgd.Correction(2), "drift": None, "average_optimizer": False, "outer": None}, {}),
    "default": ({}, {}),
    "rank0": ({"correction": lgd.Correction(0.5, "rank0", lr="local")}, {}),
    "clipped": ({"drift": lgd.Drift("ranks"), "correction": None}, {"gradient_clip_val": 0.1}),
    "bf16": (
        {"drift": lgd.Drift("global"), "average_optimizer": True, "buffers": "average"},
        {"precision": "bf16-mixed"},
    ),
    "accumulated": ({"drift": lgd.Drift("global"), "weights": "nodes"}, {"accumulate_grad_batches": 2}),
    "averaged": ({"correction": lgd.Correction(optimizer="averaged"), "average_optimizer": False}, {}),
    "statistics": ({"buffers": "global", "correction": None}, {}),
    "persistent": ({"correction": lgd.Correction(optimizer="persistent", lr=0.003)}, {}),
    "function": ({"correction": lgd.Correction(optimizer=partial(torch.optim.SGD, lr=0.5))}, {}),
}


QUICK = ["paper", "default", "rank0", "bf16", "accumulated"]


def equal_replicas(rank: int, world_size: int, names: list[str]) -> dict[str, State]:
    states = {}
    for name in names:
        options, limits = REPLICAS[name]
        strategy = lgd.LLCGStrategy(lgd.EverySteps(3), **options, **PATIENCE)
        module = model(Batched, dropout=0.5, blocks="precision" not in limits)
        torch.manual_seed(rank)
        data = data_module(partitioner=lgd.MetisPartitioner())
        fit(strategy, module, data, world_size, max_epochs=2, limit_val_batches=0, **limits)
        state = state_of(module).items()
        states[name] = {key: value for key, value in state if not key.startswith(("losses", "accuracy"))}
    return states


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in REPLICAS if name not in QUICK], marks=pytest.mark.slow)]
)
def test_replicas_are_equal_after_the_meeting(names: list[str]) -> None:
    first, second = run_ranks(equal_replicas, 2, names)
    assert {name: differs(first[name], second[name]) for name in names} == dict.fromkeys(names, 0.0)


def shares(rank: int, world_size: int, share: float) -> tuple[int, list[int]]:
    counted = []

    class Unequal:
        """Ranks that end their rounds by clocks of their own."""

        def is_over(self, progress: Any) -> bool:
            return progress.local_steps >= 2 + 4 * rank

    class Watch(CorrectionSteps):
        def take(self, first: int, last: int) -> None:
            counted.append(last - first)
            super().take(first, last)

    llcg.WAYS["sliced"] = Watch
    strategy = lgd.LLCGStrategy(Unequal(), correction=lgd.Correction(share), **PATIENCE)
    trainer = fit(strategy, model(), data_module(), world_size, max_epochs=2)
    return trainer.global_step, counted


def test_a_share_counts_the_mean_of_all_ranks_steps() -> None:
    (few, first), (many, second) = run_ranks(shares, 2, 0.5)
    assert few == many == 12  # the ranks agree on the steps of the one with most
    assert first == second == [2, 2]


# The correction is clipped as local steps are.


class Steep(SAGE):
    """A loss whose gradients are far too long."""

    def training_step(self, batch: Any) -> Tensor:
        return 1000 * super().training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class OwnClipping(Steep):
    def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:  # type: ignore[override]
        self.clip_gradients(optimizer, 0.25, "norm")


def longest_corrections(rank: int, world_size: int) -> list[tuple[float, float]]:
    """In each case the Euclidean length of the longest correction step, and its largest entry."""
    return [longest_correction(world_size, *case[:3]) for case in CLIPPED]


def longest_correction(
    world_size: int, kind: type[SAGE], correction: str, options: dict[str, Any]
) -> tuple[float, float]:
    moves: list[Tensor] = []

    class Watch({"sliced": CorrectionSteps, "rank0": StepsOnRank0}[correction]):  # type: ignore[misc]
        def _step(self, gradient: list[Tensor]) -> None:
            parameters = self.fit.trained_parameters()
            before = torch.nn.utils.parameters_to_vector(parameters).detach()
            super()._step(gradient)
            moves.append(torch.nn.utils.parameters_to_vector(parameters).detach() - before)

    llcg.WAYS[correction] = Watch
    chosen = lgd.Correction.as_published(2, correction)  # type: ignore[arg-type]
    strategy = lgd.LLCGStrategy.as_published(lgd.EverySteps(2), correction=chosen, **PATIENCE)
    fit(strategy, model(kind), data_module(), world_size, max_epochs=2, **options)
    return max((float(move.norm()) for move in moves), default=0), max((float(m.abs().max()) for m in moves), default=0)


CLIPPED: list[tuple[type[SAGE], str, dict[str, Any], tuple[float | None, float | None]]] = [
    (Steep, "sliced", {"gradient_clip_val": 0.5}, (0.5, None)),
    (Steep, "rank0", {"gradient_clip_val": 0.5}, (0.5, None)),
    (Steep, "sliced", {"gradient_clip_val": 0.125, "gradient_clip_algorithm": "value"}, (None, 0.125)),
    (OwnClipping, "sliced", {}, (0.25, None)),
]


def test_corrections_are_clipped() -> None:
    first, *_ = run_ranks(longest_corrections, 2)
    for found, (kind, way, _, longest) in zip(first, CLIPPED, strict=True):
        for length, expected in zip(found, longest, strict=True):
            assert expected is None or length == pytest.approx(expected, rel=1e-4), (kind, way)


# What the correction leaves alone.


class Logged(Batched):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log("plain_loss", loss, on_epoch=True, on_step=False, batch_size=batch.batch_size)
        self.log_dict({"seeds": float(batch.batch_size)}, on_epoch=True, on_step=False, reduce_fx="sum", batch_size=1)
        return loss


def logged(rank: int, world_size: int) -> list[list[float]]:
    """Without corrections, and with five."""
    found = []
    for strategy in (
        lgd.LLCGStrategy.as_published(lgd.EverySteps(4), correction=None, **PATIENCE),
        lgd.LLCGStrategy(lgd.EverySteps(4), correction=lgd.Correction(5, lr=1e-12), **PATIENCE),
    ):
        trainer = fit(strategy, model(Logged), data_module(), world_size, max_epochs=1, limit_val_batches=0)
        found.append([float(trainer.callback_metrics[name]) for name in ("train_loss", "plain_loss", "seeds")])
    return found


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_corrections_do_not_reach_the_epochs_means() -> None:
    # At a learning rate of nothing and with the shift of equal parts, corrections change no local step to speak of.
    for without, with_corrections in run_ranks(logged, 2):
        assert without[2] == with_corrections[2]
        assert without[:2] == pytest.approx(with_corrections[:2], rel=0.2)


def remembered(rank: int, world_size: int, options: dict[str, Any]) -> State:
    module = model(Remembering)
    strategy = lgd.LLCGStrategy(lgd.EverySteps(3), correction=lgd.Correction(2, lr="local"), **options, **PATIENCE)
    data = data_module(partitioner=lgd.MetisPartitioner())
    fit(strategy, module, data, world_size, callbacks=[lgd.DiscrepancyProbe()])
    return {name: value for name, value in state_of(module).items() if name in ("mean_loss", "steps")}


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(options, marks=pytest.mark.slow) for options in ({"drift": None}, {"buffers": "global"}))],
    ids=["anchor", "probe", "statistics"],
)
def test_what_is_measured_moves_no_buffer_and_all_are_averaged(options: dict[str, Any]) -> None:
    first, second = run_ranks(remembered, 2, options)
    assert differs(first, second) == 0.0
    assert first["steps"] == 3 * (3 + 2)


# A replica that went its own way is noticed.


def tampered(rank: int, world_size: int) -> None:
    class Tamper(lgd.LocalSGDStrategy):
        def end_round(self) -> None:
            super().end_round()
            if self.state.round_idx == 1 and rank == 1:
                next(self._module().parameters()).data.view(-1)[3] += 1e-6

    fit(Tamper(lgd.EverySteps(2), **PATIENCE), model(), data_module(), world_size)


def test_the_checksum_names_the_rank_that_differs() -> None:
    with pytest.raises(RankError, match=r"meeting of round 1 the replicas of ranks \[1\] differ"):
        run_ranks(tampered, 2)


# Refusals.


def test_corrections_that_could_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match="set it where you make that"):
        lgd.Correction(optimizer=torch.optim.Adam, lr=0.1)


def test_no_default_follows_another_argument() -> None:
    names = ("correction", "average_optimizer", "outer", "weights", "drift")
    usual = {name: getattr(lgd.LLCGStrategy(), name) for name in names}
    for name, other in {"correction": None, "drift": None, "average_optimizer": False, "outer": None}.items():
        strategy = lgd.LLCGStrategy(**{name: other})  # type: ignore[arg-type]
        assert {each: getattr(strategy, each) for each in names} == usual | {name: other}


def test_the_papers_method_has_a_name() -> None:
    strategy = lgd.LLCGStrategy.as_published(lgd.EverySteps(4))
    plain = (strategy.drift, strategy.outer, strategy.average_optimizer, strategy.weights)
    assert plain == (None, None, False, "uniform")
    assert strategy.correction == lgd.Correction(1, "sliced", "persistent", "local")
    assert lgd.GlobalBatching.as_published(3) == lgd.GlobalBatching(sampler=lgd.NeighborSampler([-1, -1, -1]))
    assert pickle.loads(pickle.dumps(strategy.correction)) == strategy.correction


def fit_without_the_graph(rank: int, world_size: int) -> list[str]:
    said = []
    for strategy in (
        lgd.LocalSGDStrategy(drift=lgd.Drift()),
        lgd.LLCGStrategy.as_published(correction=None, buffers="global"),
    ):
        with pytest.raises(ValueError, match="needs a data module") as caught:
            trainer(world_size, strategy).fit(Net(), batches(0), batches(0))
        said.append(str(caught.value))
    return said


def test_a_fit_without_the_graph_is_refused_by_the_setting_that_needs_it() -> None:
    for drifts, buffers in run_ranks(fit_without_the_graph, 2):
        assert re.search(r"needs a data module with .* as PartitionedDataModule has", drifts)
        assert 'buffers="global" needs a data module with correction_batches' in buffers
