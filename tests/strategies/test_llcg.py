"""Laws of LLCG, on several gloo ranks and real parts."""

import copy
import math
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.strategies import llcg
from lightning_gnn_dist.strategies.correction import CorrectionSteps, StepsOnRank0
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.by_hand import Plain, agreement, decay_by_hand, double_graph, gradient_among
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


# A round of LLCG as it is by default, against one by hand.


RANKS, STEPS, ROUNDS = 3, 3, 3
RATE = 0.001  # small: shifts then change little from round to round, and fade more slowly


def plain() -> Plain:
    torch.manual_seed(0)
    return Plain(lambda parameters: torch.optim.Adam(parameters, lr=RATE))


def parts() -> lgd.Partition:
    """Of 44, 133 and 223 nodes."""
    return lgd.Partition((torch.arange(400).sqrt() / 20 * RANKS).int(), RANKS)


def in_rounds(rank: int, world_size: int, settings: list[tuple[Any, int]]) -> list[State]:
    """The ends of fits by a reducer, with so many local steps in a round."""
    found = []
    for reducer, steps in settings:
        data = lgd.PartitionedDataModule(
            double_graph(),
            partitioner=parts(),
            sampler=lgd.WholePartSampler(2),
            batch_size=10**6,
            boundary=lgd.Isolated(),
            global_batching=lgd.GlobalBatching(batch_size=10**6, sampler=lgd.NeighborSampler([-1, -1])),
        )
        module = plain()
        strategy = lgd.LLCGStrategy(lgd.EverySteps(steps), reducer=reducer, **PATIENCE)
        fit(strategy, module, data, world_size, max_epochs=ROUNDS, limit_val_batches=0)
        state = {name: value for name, value in state_of(module).items() if not name.startswith("accuracy")}
        found.append(state)
    return found


def by_hand(steps: int = STEPS) -> State:
    """Local steps that are shifted, a mean with momentum, moments averaged, one correction step for ten, an anchor.

    The shift of a rank fades the more slowly the less it has changed.
    """
    corrections, graph = math.ceil(steps / 10), double_graph()

    def step(adam: torch.optim.Adam, gradients: list[Tensor]) -> None:
        for parameter, each in zip(adam.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = each
        adam.step()

    everyone, of_ranks = torch.arange(400), [parts().nodes(rank) for rank in range(RANKS)]
    train = graph.node_arrays["train_mask"]
    share = [int(train[nodes].sum()) / int(train.sum()) for nodes in of_ranks]
    mean, nets = plain(), [plain() for _ in of_ranks]
    adams = [torch.optim.Adam(net.parameters(), lr=RATE) for net in nets]
    corrector = torch.optim.Adam(mean.parameters(), lr=RATE / corrections**0.75)
    speed = [torch.zeros_like(p) for p in mean.parameters()]
    old, decays = list[Tensor](), [0.8] * RANKS

    def shifts_now() -> list[list[Tensor]]:
        whole = gradient_among(mean, graph, everyone)
        own = [gradient_among(mean, graph, nodes) for nodes in of_ranks]
        return [[a - b for a, b in zip(whole, each, strict=True)] for each in own]

    shifts = shifts_now()
    for _ in range(ROUNDS):
        for net, nodes, adam, shift, decay in zip(nets, of_ranks, adams, shifts, decays, strict=True):
            net.load_state_dict(mean.state_dict())
            for number in range(steps):
                own = gradient_among(net, graph, nodes)
                step(adam, [g + decay**number * s for g, s in zip(own, shift, strict=True)])
        ends = [list(net.parameters()) for net in nets]
        ways = [
            (parameter - sum(w * end[place] for w, end in zip(share, ends, strict=True))).detach()
            for place, parameter in enumerate(mean.parameters())
        ]
        momentum, old = 0.8 * agreement(ways, old) ** 4, ways
        for place, (parameter, way) in enumerate(zip(mean.parameters(), ways, strict=True)):
            speed[place] = momentum * speed[place] + way
            parameter.data -= speed[place]
            states = [adam.state[list(net.parameters())[place]] for net, adam in zip(nets, adams, strict=True)]
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = sum(w * state[moment] for w, state in zip(share, states, strict=True))
                for state in states:
                    state[moment] = whole.clone()
            corrector.state[parameter] = copy.deepcopy(states[0])
        for _ in range(corrections):
            step(corrector, gradient_among(mean, graph, everyone))
        before, shifts = shifts, shifts_now()
        decays = [decay_by_hand(then, now) for then, now in zip(before, shifts, strict=True)]
    return state_of(mean)


def test_a_round_is_that_by_hand() -> None:
    expected, longer = by_hand(), by_hand(12)
    for exact, long in run_ranks(in_rounds, RANKS, [(None, STEPS), (None, 12)]):
        assert max(float((exact[name] - expected[name]).abs().max()) for name in exact) < 1e-12
        assert max(float((long[name] - longer[name]).abs().max()) for name in exact) < 1e-11


def calls(rank: int, world_size: int) -> list[float]:
    """How often a rank calls the step in the second round, of ten local steps."""
    counted = []
    for drift in (lgd.Drift(), lgd.Drift(anchor_steps=1)):
        strategy = lgd.LLCGStrategy(lgd.EverySteps(10), drift=drift, **PATIENCE)
        trainer = fit(strategy, model(), data_module(), world_size, max_epochs=2, limit_val_batches=0)
        counted.append(float(trainer.callback_metrics["round/gradients"]) / world_size)
    return counted


def test_a_round_calls_the_step_for_two_anchors_and_a_correction() -> None:
    assert run_ranks(calls, 2) == [[10 + 4 + 4 + 1, 10 + 1 + 1 + 1]] * 2


# Law 7: a run of LLCG that was stopped and resumed ends where the other ends.


PLAIN: dict[str, Any] = {"drift": None, "average_optimizer": False, "outer": None}


def resumed(rank: int, world_size: int, folder: str, kind: type[SAGE], options: dict[str, Any]) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(kind, dropout=0.5)
        torch.manual_seed(rank)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        strategy = lgd.LLCGStrategy(lgd.EverySteps(4, growth=1.5, limit=8), **options, **PATIENCE)
        settings = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 4, "limit_val_batches": 0}
        fit(strategy, module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(SAGE, PLAIN | {"correction": lgd.Correction.as_published(2)}, marks=pytest.mark.slow),
        pytest.param(SAGE, {"drift": lgd.Drift("ranks"), "correction": None}, marks=pytest.mark.slow),
        (SAGE, {"drift": lgd.Drift("global"), "correction": lgd.Correction(0.5, lr="local")}),
        pytest.param(SAGE, {"correction": lgd.Correction(optimizer="persistent")}, marks=pytest.mark.slow),
        pytest.param(Remembering, {}, marks=pytest.mark.slow),
    ],
    ids=["paper", "ranks", "global", "persistent", "buffers"],
)
def test_a_resumed_run_ends_with_the_same_weights(kind: type[SAGE], options: dict[str, Any], tmp_path: Path) -> None:
    for whole, again in run_ranks(resumed, 2, str(tmp_path), kind, options):
        assert differs(whole, again) == 0.0


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second round on, and ``again`` when a run is resumed."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.convs[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.convs[0], optimizer, lr=0.001)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.again and trainer.current_epoch > 1:
            self.make_trainable(module.convs[0])


class TrainsWhatIsNotFrozen(SAGE):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def resumed_after_unfreezing(rank: int, world_size: int, folder: str, again: bool) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(TrainsWhatIsNotFrozen)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        settings = {"enable_checkpointing": True, "callbacks": [saver, Unfreeze(again)]}
        fit(lgd.LLCGStrategy(lgd.EverySteps(2), **PATIENCE), module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.slow
def test_resuming_needs_what_was_unfrozen(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"shifts 6 parameters .* trains 3 .* at the latest in on_train_start"):
        run_ranks(resumed_after_unfreezing, 2, str(tmp_path), False)
    for whole, again in run_ranks(resumed_after_unfreezing, 2, str(tmp_path), True):
        assert differs(whole, again) == 0.0
