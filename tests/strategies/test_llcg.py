"""Laws of LLCG and of drift correction, on several gloo ranks and real parts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from lightning_gnn_dist import collectives
from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe
from lightning_gnn_dist.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.rounds import EverySteps
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.strategies.drift import DriftCorrection
from lightning_gnn_dist.strategies.gradients import mean_gradient, step_of
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import Net, State, batches, differs, state_of

PATIENCE = {"timeout": timedelta(seconds=30)}


def small_graph() -> Graph:
    return communities(400, 4, num_features=12, train_share=0.2, noise=2.0, seed=3)


def data_module(**options: Any) -> PartitionedDataModule:
    defaults: dict[str, Any] = {"sampler": NeighborSampler([4, 4]), "batch_size": 8, "eval_batch_size": 100}
    return PartitionedDataModule(small_graph(), **(defaults | options))


class Batched(SAGE):
    """With a statistic that batches move."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = torch.nn.BatchNorm1d(12)
        self.losses = MeanMetric()
        self.steps_logged = 0

    def forward(self, batch: Any) -> Tensor:
        batch.x = self.norm(batch.x)
        return super().forward(batch)

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.losses(loss.detach())
        self.log("train_loss", self.losses, on_epoch=True, batch_size=batch.batch_size)
        return loss


class Remembering(SAGE):
    """Writes into a buffer, and puts another in its place, at every step; and its loss depends on them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mean_loss", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.mean_loss.mul_(0.9).add_(0.1 * loss.detach())
        self.steps = self.steps + 1
        return loss + 0.1 * self.mean_loss.sum() * sum(parameter.square().sum() for parameter in self.parameters())


def model(kind: type[SAGE] = SAGE, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(12, 4, **options)


def fit(
    strategy: Any, module: Any, data: Any, world_size: int, ckpt_path: str | None = None, **options: Any
) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 3, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


# Law 2: nothing to correct is local SGD.


def without_correction(rank: int, world_size: int) -> tuple[State, State]:
    states = []
    for strategy in (LocalSGDStrategy, LLCGStrategy):
        options = {"weights": "nodes"} | (
            {} if strategy is LocalSGDStrategy else {"correction_steps": 0, "drift": None}
        )
        module = model(dropout=0.3)
        torch.manual_seed(rank)
        fit(strategy(EverySteps(3), **PATIENCE, **options), module, data_module(), world_size)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.slow
def test_llcg_without_correction_is_local_sgd() -> None:
    for local, llcg in run_ranks(without_correction, 2):
        assert differs(local, llcg) == 0.0


# Law 3: slices of a global batch give the gradient of the whole batch.


def corrected(rank: int, world_size: int, correction: str, correction_batch_size: int) -> State:
    strategy = LLCGStrategy(EverySteps(2), correction_steps=3, drift=None, correction=correction, **PATIENCE)  # type: ignore[arg-type]
    everything = NeighborSampler([-1, -1])
    data = data_module(correction_batch_size=correction_batch_size, correction_sampler=everything)
    module = model()
    fit(strategy, module, data, world_size, max_epochs=2)
    return state_of(module)


@pytest.mark.parametrize("correction_batch_size", [7, 2], ids=["uneven", "a rank idles"])
def test_sliced_correction_is_the_single_servers(correction_batch_size: int) -> None:
    sliced = run_ranks(corrected, 3, "sliced", correction_batch_size)
    on_rank0 = run_ranks(corrected, 3, "rank0", correction_batch_size)
    for left, right in zip(sliced, on_rank0, strict=True):
        # Adam divides by the gradient's own size, so 1e-6 of a gradient may be more of a weight.
        assert differs(left, right) < 2e-5
    assert differs(sliced[0], run_ranks(corrected, 3, "sliced", 20)[0]) > 1e-3


def sliced_gradient(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    found: list[list[Tensor]] = []

    class Watch(LLCGStrategy):
        def end_round(self) -> None:
            super().end_round()  # from here on all ranks stand at the same weights
            sampled = self._module().trainer.datamodule  # type: ignore[attr-defined]
            for sliced in (True, False):
                gradient, seeds = mean_gradient(self, [next(sampled.correction_batches(0, sliced=sliced))])
                if sliced:
                    collectives.average_(gradient, seeds)
                found.append(gradient)

    data = data_module(correction_batch_size=31, correction_sampler=NeighborSampler([-1, -1]))
    fit(Watch(EverySteps(1), correction_steps=0, drift=None, **PATIENCE), model(), data, world_size, max_epochs=1)
    return found[0], found[1]


def test_the_sliced_gradient_is_the_whole_batchs_to_1e_6() -> None:
    for sliced, whole in run_ranks(sliced_gradient, 3):
        for left, right in zip(sliced, whole, strict=True):
            assert (left - right).abs().max() < 1e-6


# Law 4: replicas stay equal, with everything that could drive them apart.


def equal_replicas(rank: int, world_size: int, options: dict[str, Any], trainer: dict[str, Any]) -> State:
    strategy = LLCGStrategy(EverySteps(3), **options, **PATIENCE)
    module = model(Batched, dropout=0.5, blocks="precision" not in trainer)
    torch.manual_seed(rank)
    fit(strategy, module, data_module(partitioner=MetisPartitioner()), world_size, **trainer)
    state = state_of(module)
    return {name: value for name, value in state.items() if not name.startswith(("losses", "accuracy"))}


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"correction_steps": 2, "drift": None}, {}),
        ({}, {}),
        ({"correction_steps": 0.5, "correction": "rank0"}, {}),
        ({"drift": "ranks", "correction_steps": 0}, {"gradient_clip_val": 0.1}),
        ({"drift": "global", "average_optimizer": True, "buffers": "average"}, {"precision": "bf16-mixed"}),
        ({"drift": "global", "weights": "nodes"}, {"accumulate_grad_batches": 2}),
        ({"correction_optimizer": "averaged"}, {}),
        ({"buffers": "global", "correction_steps": 0}, {}),
        ({"correction_optimizer": "reset", "correction_lr": 0.003}, {}),
        ({"correction_optimizer": "sgd", "correction_lr": 0.5}, {}),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_replicas_are_equal_after_the_meeting(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    first, second = run_ranks(equal_replicas, 2, options, trainer)
    assert differs(first, second) == 0.0


def statistics(rank: int, world_size: int, buffers: str) -> tuple[Tensor, Tensor, float | None]:
    module = model(Batched, dropout=0.5)
    strategy = LLCGStrategy(EverySteps(3), buffers=buffers, anchor_steps=1, **PATIENCE)  # type: ignore[arg-type]
    data = data_module(partitioner=MetisPartitioner(), correction_batch_size=10**6)
    data.correction_sampler = NeighborSampler([-1, -1])
    fit(strategy, module, data, world_size)
    return module.norm.running_mean, module.norm.running_var, module.norm.momentum


def test_global_statistics_are_those_of_the_whole_graph() -> None:
    x = small_graph().node_arrays["x"]
    for (mean, var, momentum), (average, *_) in zip(
        run_ranks(statistics, 2, "global"), run_ranks(statistics, 2, "average"), strict=True
    ):
        # Every node with an edge is in the neighbourhood of a training node, on one rank or on both.
        assert (mean - x.mean(0)).abs().max() < 0.5 * (average - x.mean(0)).abs().max()
        assert (var / x.var(0) - 1).abs().max() < 0.3
        assert momentum == 0.1


def statistics_of_one_seed(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    module = model(Batched)
    strategy = LLCGStrategy(EverySteps(2), buffers="global", correction_steps=0, drift=None, **PATIENCE)
    data = data_module(correction_batch_size=1)
    fit(strategy, module, data, world_size, max_epochs=1, limit_val_batches=0)
    seen = torch.stack([batch.x.mean(0) for batch in data.correction_batches(0, sliced=False, stop=4)])
    return module.norm.running_mean, seen.mean(0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_without_seeds_adds_nothing_to_the_statistics() -> None:
    for mean, expected in run_ranks(statistics_of_one_seed, 2):
        assert (mean - expected).abs().max() < 1e-5


class FrozenNorm(pl.Callback):
    """Keeps the statistics as they came, which is how a pretrained layer is frozen."""

    def __init__(self) -> None:
        self.stayed: list[bool] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.norm.eval()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.stayed.append(not module.norm.training and module.convs.training)


def frozen_statistics(rank: int, world_size: int) -> tuple[list[bool], Tensor]:
    module = model(Batched)
    strategy = LLCGStrategy(EverySteps(3), buffers="global", **PATIENCE)
    fit(strategy, module, data_module(), world_size, callbacks=[frozen := FrozenNorm()], limit_val_batches=0)
    return frozen.stayed, module.norm.running_mean


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_frozen_layer_keeps_its_statistics() -> None:
    for stayed, mean in run_ranks(frozen_statistics, 2):
        assert stayed == [True] * 3
        assert not mean.any()


# Law 7: resuming.


def resumed(rank: int, world_size: int, folder: str, kind: type[SAGE], options: dict[str, Any]) -> tuple[State, State]:
    states = []
    for epochs, path in ((4, None), (2, None), (4, f"{folder}/epoch=1.ckpt")):
        module = model(kind, dropout=0.5)
        torch.manual_seed(rank)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        strategy = LLCGStrategy(EverySteps(4, growth=1.5, limit=8), **options, **PATIENCE)
        settings = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": epochs}
        fit(strategy, module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[2]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SAGE, {"correction_steps": 2, "drift": None}),
        (SAGE, {"drift": "ranks", "correction_steps": 0}),
        (SAGE, {"drift": "global", "correction_steps": 0.5}),
        (SAGE, {"correction_optimizer": "persistent"}),
        (Remembering, {}),
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
        fit(LLCGStrategy(EverySteps(2), **PATIENCE), module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_resuming_needs_what_was_unfrozen(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"shifts 6 parameters .* trains 3 .* at the latest in on_train_start"):
        run_ranks(resumed_after_unfreezing, 2, str(tmp_path), False)
    for whole, again in run_ranks(resumed_after_unfreezing, 2, str(tmp_path), True):
        assert differs(whole, again) == 0.0


# Drift correction is what it says.


def shifted(rank: int, world_size: int, drift: str) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of the first local step after an anchor at the same weights, and the one of the whole graph."""
    seen: list[list[Tensor]] = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            if not seen:
                seen.append([parameter.grad.clone() for parameter in module.parameters()])

    whole = WholePartSampler(num_hops=2)
    strategy = LLCGStrategy(EverySteps(2), correction_steps=0, drift=drift, **PATIENCE)  # type: ignore[arg-type]
    data = data_module(sampler=whole, batch_size=10**6, partitioner=MetisPartitioner())
    module = model()
    graph = small_graph()
    alone = PartitionedDataModule(graph, sampler=whole, batch_size=10**6)
    batch = next(iter(alone.train_dataloader()))
    expected = torch.autograd.grad(module.training_step(batch), list(module.parameters()))
    fit(strategy, module, data, world_size, max_epochs=1, callbacks=[Watch()])
    return seen[0], list(expected)


def test_at_the_anchor_every_rank_steps_along_the_global_gradient() -> None:
    for gradient, expected in run_ranks(shifted, 3, "global"):
        for left, right in zip(gradient, expected, strict=True):
            assert (left - right).abs().max() < 1e-5


def test_at_the_anchor_every_rank_steps_along_the_mean_gradient() -> None:
    (first, expected), (second, _), (third, _) = run_ranks(shifted, 3, "ranks")
    for left, middle, right in zip(first, second, third, strict=True):
        assert (left - middle).abs().max() < 1e-6 and (left - right).abs().max() < 1e-6
    assert max(float((left - right).abs().max()) for left, right in zip(first, expected, strict=True)) > 1e-4


def test_the_shift_fades_with_the_steps_and_starts_anew_at_an_anchor() -> None:
    weight = torch.zeros(2, requires_grad=True)
    frozen = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight, frozen], lr=1.0)
    drift = DriftCorrection(decay=0.5)
    for _ in range(2):
        drift.anchor([weight, frozen], [torch.tensor([3.0, 0.0])] * 2, [torch.tensor([1.0, 1.0])] * 2)
        seen = []
        for _ in range(3):
            weight.grad = torch.zeros(2)
            drift.apply_(optimizer)
            seen.append(weight.grad.tolist())
        assert seen == [[2.0, -1.0], [1.0, -0.5], [0.5, -0.25]]
    assert frozen.grad is None


def shares(rank: int, world_size: int, share: float) -> tuple[int, list[int]]:
    counted = []

    class Unequal:
        """Ranks that end their rounds by clocks of their own."""

        def is_over(self, progress: Any) -> bool:
            return progress.local_steps >= 2 + 4 * rank

    class Watch(LLCGStrategy):
        def _correct_together(self, steps: int) -> None:
            counted.append(steps)
            super()._correct_together(steps)

    strategy = Watch(Unequal(), correction_steps=share, **PATIENCE)
    trainer = fit(strategy, model(), data_module(), world_size, max_epochs=2)
    return trainer.global_step, counted


def test_a_share_counts_the_mean_of_all_ranks_steps() -> None:
    (few, first), (many, second) = run_ranks(shares, 2, 0.5)
    assert few == many == 12  # the ranks agree on the steps of the one with most
    assert first == second == [2, 2]


def one_rank_drift(rank: int, world_size: int) -> tuple[State, State]:
    states = []
    for options in ({}, {"drift": "ranks", "drift_decay": 1.0}):
        module = model(dropout=0.3)
        torch.manual_seed(0)
        fit(LocalSGDStrategy(EverySteps(4), **PATIENCE, **options), module, data_module(), world_size)
        states.append(state_of(module))
    return states[0], states[1]


def test_alone_there_is_no_drift_to_correct() -> None:
    plain, drift = run_ranks(one_rank_drift, 1)[0]
    assert differs(plain, drift) == 0.0


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


def longest_corrections(
    rank: int, world_size: int, kind: type[SAGE], correction: str, options: dict[str, Any]
) -> tuple[float, float]:
    """The Euclidean length of the longest correction step, and its largest entry."""
    moves: list[Tensor] = []

    class Watch(LLCGStrategy):
        def _step(self, gradient: list[Tensor]) -> None:
            parameters = list(self._module().parameters())
            before = torch.nn.utils.parameters_to_vector(parameters).detach()
            super()._step(gradient)
            moves.append(torch.nn.utils.parameters_to_vector(parameters).detach() - before)

    strategy = Watch(EverySteps(2), correction_steps=2, drift=None, correction=correction, **PATIENCE)  # type: ignore[arg-type]
    fit(strategy, model(kind), data_module(), world_size, max_epochs=2, **options)
    return max((float(move.norm()) for move in moves), default=0), max((float(m.abs().max()) for m in moves), default=0)


@pytest.mark.parametrize(
    ("kind", "correction", "options", "longest"),
    [
        (Steep, "sliced", {"gradient_clip_val": 0.5}, (0.5, None)),
        (Steep, "rank0", {"gradient_clip_val": 0.5}, (0.5, None)),
        (Steep, "sliced", {"gradient_clip_val": 0.125, "gradient_clip_algorithm": "value"}, (None, 0.125)),
        (OwnClipping, "sliced", {}, (0.25, None)),
    ],
    ids=["norm", "rank0", "value", "hook"],
)
def test_corrections_are_clipped(
    kind: type[SAGE], correction: str, options: dict[str, Any], longest: tuple[float | None, float | None]
) -> None:
    first, *_ = run_ranks(longest_corrections, 2, kind, correction, options)
    for found, expected in zip(first, longest, strict=True):
        assert expected is None or found == pytest.approx(expected, rel=1e-4)


# What the correction leaves alone.


class Logged(Batched):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.log("plain_loss", loss, on_epoch=True, on_step=False, batch_size=batch.batch_size)
        self.log_dict({"seeds": float(batch.batch_size)}, on_epoch=True, on_step=False, reduce_fx="sum", batch_size=1)
        return loss


def logged(rank: int, world_size: int, steps: int) -> list[float]:
    module = model(Logged)
    drift = "global" if steps else None
    strategy = LLCGStrategy(EverySteps(4), correction_steps=steps, drift=drift, correction_lr=1e-12, **PATIENCE)
    trainer = fit(strategy, module, data_module(), world_size, max_epochs=1, limit_val_batches=0)
    return [float(trainer.callback_metrics[name]) for name in ("train_loss", "plain_loss", "seeds")]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_corrections_do_not_reach_the_epochs_means() -> None:
    # At a learning rate of nothing and with the shift of equal parts, corrections change no local step to speak of.
    for without, with_corrections in zip(run_ranks(logged, 2, 0), run_ranks(logged, 2, 5), strict=True):
        assert without[2] == with_corrections[2]
        assert without[:2] == pytest.approx(with_corrections[:2], rel=0.2)


def remembered(rank: int, world_size: int, options: dict[str, Any]) -> State:
    module = model(Remembering)
    strategy = LLCGStrategy(EverySteps(3), correction_steps=2, **options, **PATIENCE)
    fit(strategy, module, data_module(partitioner=MetisPartitioner()), world_size, callbacks=[DiscrepancyProbe()])
    return {name: value for name, value in state_of(module).items() if name in ("mean_loss", "steps")}


@pytest.mark.parametrize("options", [{}, {"drift": None}, {"buffers": "global"}], ids=["anchor", "probe", "statistics"])
def test_what_is_measured_moves_no_buffer_and_all_are_averaged(options: dict[str, Any]) -> None:
    first, second = run_ranks(remembered, 2, options)
    assert differs(first, second) == 0.0
    assert first["steps"] == 3 * (3 + 2)


class Own(SAGE):
    """Manual optimisation, and its own idea of a correction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False
        self.corrections = 0

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


class Corrected(Own):
    def correction_step(self, batch: Any) -> Tensor:
        self.corrections += 1
        return SAGE.training_step(self, batch)


def manual(rank: int, world_size: int, kind: type[Own]) -> tuple[int, State]:
    module = model(kind)
    fit(LLCGStrategy(EverySteps(2), correction_steps=2, drift=None, **PATIENCE), module, data_module(), world_size)
    return module.corrections, state_of(module)


def test_a_module_may_define_its_correction_step() -> None:
    (count, first), (_, second) = run_ranks(manual, 2, Corrected)
    assert count == 3 * 2 and differs(first, second) == 0.0


def test_manual_optimisation_without_one_is_refused() -> None:
    with pytest.raises(RankError, match=r"define correction_step\(batch\)"):
        run_ranks(manual, 2, Own)


class WithOptions(SAGE):
    def training_step(self, batch: Any, **options: Any) -> Tensor:
        return super().training_step(batch)


class WithDefaults(SAGE):
    def training_step(self, batch: Any, batch_idx: int = -1, *, scale: float = 1.0) -> Tensor:
        assert batch_idx >= 0
        return scale * super().training_step(batch)


class WithAny(SAGE):
    def training_step(self, *args: Any) -> Tensor:
        batch, _ = args
        return super().training_step(batch)


@pytest.mark.parametrize("kind", [SAGE, WithOptions, WithDefaults, WithAny])
def test_a_step_is_called_as_lightning_calls_it(kind: type[SAGE]) -> None:
    data, module = data_module(), model(kind)
    batch = next(data.correction_batches(0))
    loss = step_of(module)(batch)
    assert loss is not None and loss.requires_grad
    fit("auto", module, data, 1, fast_dev_run=1)


class Gathers(SAGE):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        assert self.all_gather(loss.detach()).shape == (2,)
        return loss


def gathering(rank: int, world_size: int, correction: str) -> None:
    strategy = LLCGStrategy(EverySteps(2), correction=correction, **PATIENCE)  # type: ignore[arg-type]
    fit(strategy, model(Gathers), data_module(), world_size)


@pytest.mark.filterwarnings("ignore:.*functional.all_gather is deprecated")
def test_an_exchange_is_fine_where_all_correct_and_refused_where_one_does() -> None:
    run_ranks(gathering, 2, "sliced")
    with pytest.raises(RankError, match=r'all_gather\(\) exchanges inside a correction: with correction="rank0"'):
        run_ranks(gathering, 2, "rank0")


class Vector(SAGE):
    def correction_step(self, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")


class Detached(SAGE):
    def correction_step(self, batch: Any) -> Any:
        return self.training_step(batch).detach()


class Number(SAGE):
    def correction_step(self, batch: Any) -> Any:
        return 1.0


class NoLoss(SAGE):
    def training_step(self, batch: Any) -> Any:
        return {"logits": self(batch)}


class Backward(SAGE):
    def correction_step(self, batch: Any) -> Any:
        loss = self.training_step(batch)
        loss.backward()
        return loss


class Skips(SAGE):
    def correction_step(self, batch: Any) -> None:
        return None


class TwoArguments(SAGE):
    def correction_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch)


def correct_by(rank: int, world_size: int, kind: type[SAGE], options: dict[str, Any]) -> None:
    fit(LLCGStrategy(EverySteps(1), **options, **PATIENCE), model(kind), data_module(batch_size=6), world_size)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Vector, r"correction_step\(\) returned a tensor of shape \(\d,\), but a correction needs the mean loss"),
        (Detached, r"correction_step\(\) returned a loss without a gradient, detached"),
        (Number, r"correction_step\(\) returned a float, .* with its gradient: return that\."),
        (NoLoss, r"training_step\(\) returned a dict, .* or define correction_step\(batch\)"),
        (Backward, r"correction_step\(\) must return the loss and leave backward\(\) to the strategy"),
        (Skips, r"correction_step\(\) returned None for every batch"),
        (TwoArguments, r"correction_step\(batch\) is called with the batch alone: missing .*'batch_idx'"),
    ],
)
def test_a_step_without_a_loss_is_named(kind: type[SAGE], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        correct_by(0, 1, kind, {})


@pytest.mark.parametrize("options", [{}, {"drift": None}, {"drift": None, "correction": "rank0"}])
def test_ranks_that_skip_every_batch_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=r"correction_step\(\) returned None for every batch"):
        run_ranks(correct_by, 2, Skips, options)


# A replica that went its own way is noticed.


def tampered(rank: int, world_size: int) -> None:
    class Tamper(LocalSGDStrategy):
        def end_round(self) -> None:
            super().end_round()
            if self.round_idx == 1 and rank == 1:
                next(self._module().parameters()).data.view(-1)[3] += 1e-6

    fit(Tamper(EverySteps(2), **PATIENCE), model(), data_module(), world_size)


def test_the_checksum_names_the_rank_that_differs() -> None:
    with pytest.raises(RankError, match=r"meeting of round 1 the replicas of ranks \[1\] differ"):
        run_ranks(tampered, 2)


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction_steps": -1}, "correction_steps must be a whole number .* got -1"),
        ({"correction_steps": 1.5}, "between 0.0 and 1.0"),
        ({"correction_steps": True}, "got True"),
        ({"correction": "server"}, r"correction must be one of \['sliced', 'rank0'\]"),
        ({"correction_lr": 0.0}, r"correction_lr must be a positive number, .* got 0\.0"),
        ({"correction_lr": True}, "got True"),
        ({"correction_lr": float("inf")}, "got inf"),
        ({"correction_lr": "0.1"}, r"got '0\.1'"),
        ({"correction_optimizer": "adam"}, "correction_optimizer must be one of"),
        ({"correction_optimizer": torch.optim.Adam, "correction_lr": 0.1}, "set its lr where you make it"),
        ({"drift": "local"}, r"drift must be one of \['global', 'ranks', None\], got 'local'"),
        ({"drift_decay": 1.5}, "drift_decay must lie in"),
        ({"drift_decay": "0.8"}, r"drift_decay must lie in .* got '0\.8'"),
        ({"anchor_steps": 0}, "anchor_steps must be an integer of at least 1"),
    ],
)
def test_settings_that_could_not_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLCGStrategy(EverySteps(4), **options)


def test_local_sgd_offers_no_global_drift() -> None:
    with pytest.raises(ValueError, match=r"drift must be one of \['ranks', None\], got 'global'"):
        LocalSGDStrategy(drift="global")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [LLCGStrategy(), LocalSGDStrategy(drift="ranks")], ids=["llcg", "drift"])
def test_a_fit_without_the_graph_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a data module with .* as PartitionedDataModule has"):
        fit_without_the_graph(strategy)


def test_the_setting_that_needs_the_graph_is_named() -> None:
    with pytest.raises(ValueError, match='buffers="global" needs a data module with correction_batches'):
        fit_without_the_graph(LLCGStrategy(correction_steps=0, drift=None, buffers="global"))


def test_a_correction_feeds_as_many_layers_as_a_local_step() -> None:
    data = data_module(correction_sampler=NeighborSampler([-1, -1, -1]))
    with pytest.raises(
        ValueError, match=r"draws 3 hops and sampler 2, .*correction_sampler=NeighborSampler\(\[-1, -1\]\)"
    ):
        fit(LLCGStrategy(**PATIENCE), model(), data, 1)


def fit_without_the_graph(strategy: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, logger=False, max_epochs=1, enable_checkpointing=False
    )
    trainer.fit(Net(), batches(0), batches(0))
