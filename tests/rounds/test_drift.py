"""Drift correction is what it says, on several gloo ranks and real parts."""

import copy
import math
import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from lightning_gnn_dist.rounds.correction_gradients import loss_of, mean_gradient, without_noise
from lightning_gnn_dist.rounds.drift import DriftCorrection
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.by_hand import Plain, double_graph, gradient_among
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import data_module, fit, model, small_graph


def shifted(rank: int, world_size: int, drift: str) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of the first local step after an anchor at the same weights, and the one of the whole graph."""
    seen: list[list[Tensor]] = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            if not seen:
                seen.append([parameter.grad.clone() for parameter in module.parameters()])

    whole = lgd.WholePartSampler(num_hops=2)
    exact: dict[str, Any] = {"correction": None, "outer": lgd.Outer()}
    strategy = lgd.LLCGStrategy(lgd.EverySteps(2), drift=lgd.Drift(drift), **exact, **PATIENCE)  # type: ignore[arg-type]
    data = data_module(sampler=whole, batch_size=10**6, partitioner=lgd.MetisPartitioner(), boundary=lgd.Isolated())
    module = model()
    graph = small_graph()
    alone = lgd.PartitionedDataModule(graph, sampler=whole, batch_size=10**6)
    batch = next(iter(alone.train_dataloader()))
    expected = torch.autograd.grad(module.training_step(batch), list(module.parameters()))
    fit(strategy, module, data, world_size, max_epochs=1, callbacks=[Watch()])
    return seen[0], list(expected)


def test_the_shift_fades_with_the_steps_and_starts_anew_at_an_anchor() -> None:
    weight = torch.zeros(2, requires_grad=True)
    frozen = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight, frozen], lr=1.0)
    drift = DriftCorrection(lgd.Drift(decay=0.5))
    for _ in range(2):
        drift.anchor_at([weight, frozen], [torch.tensor([3.0, 0.0])] * 2, [torch.tensor([1.0, 1.0])] * 2)
        seen = []
        for _ in range(3):
            weight.grad = torch.zeros(2)
            drift.before_step(optimizer)
            seen.append(weight.grad.tolist())
        assert seen == [[2.0, -1.0], [1.0, -0.5], [0.5, -0.25]]
    assert frozen.grad is None


@pytest.mark.parametrize(
    ("before", "now", "decay"),
    [
        ((), (3.0, 4.0), 0.8),
        ((3.0, 4.0), (3.0, 4.0), 1.0),
        ((3.0, 4.0), (3.5, 4.0), 0.8 + 0.2 * math.exp(-100 * 0.25 / (25 + 28.25))),
        ((3.0, 4.0), (4.0, 5.2), 0.8 + 0.2 * math.exp(-100 * 2.44 / (25 + 43.04))),
        ((3.0, 4.0), (-3.0, -4.0), 0.8),
        ((0.0, 0.0), (0.0, 0.0), 0.8),
        ((math.nan, 4.0), (3.0, 4.0), 0.8),
    ],
)
@pytest.mark.parametrize("given", [None, 0.8])
def test_the_default_fades_more_slowly_the_less_the_shift_has_changed(before, now, decay, given) -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer, drift = torch.optim.SGD([weight], lr=1.0), DriftCorrection(lgd.Drift("global", decay=given))
    for shift in [each for each in (before, now) if each]:
        drift.anchor_at([weight], [torch.tensor(shift)], [torch.zeros(2)])
    for factor in (1.0, given or decay):
        weight.grad = torch.zeros(2)
        drift.before_step(optimizer)
        assert weight.grad.tolist() == pytest.approx([factor * each for each in now])
    assert drift.state()["drift"]["decay"] == pytest.approx(given or decay)


def test_a_weight_that_was_frozen_has_no_shift_to_compare() -> None:
    first, second = (torch.zeros(1, requires_grad=True) for _ in range(2))
    drift = DriftCorrection(lgd.Drift("global"))
    for parameters in ([first], [first, second]):
        drift.anchor_at(parameters, [torch.ones(1)] * len(parameters), [torch.zeros(1)] * len(parameters))
    assert drift.state()["drift"]["decay"] == pytest.approx(0.8 + 0.2 * math.exp(-100 / 3))


# A few rounds, with norms and with parts that change, are what twenty lines make of them.


class Normed(Plain):
    """With a norm between its layers."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.norm = torch.nn.BatchNorm1d(16).double()

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


STEPS, ROUNDS = 2, 4


def in_rounds(rank: int, world_size: int, residency: Any) -> tuple[State, list[list[Tensor]]]:
    """The state after some rounds, and the nodes of each rank's part in each super-epoch."""
    graph, module = double_graph(), normed()
    chunks = residency.num_chunks(world_size)
    assignment = (torch.arange(400).sqrt() / 20 * chunks).int()  # parts of unequal sizes
    every = None if isinstance(residency, lgd.Fixed) else STEPS
    data = lgd.PartitionedDataModule(
        graph,
        partitioner=lgd.Partition(assignment, chunks),
        sampler=lgd.WholePartSampler(2),
        batch_size=10**6,
        holding=lgd.Holding(residency, every=every),
        boundary=lgd.Isolated(),
    )
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(STEPS), drift=lgd.Drift("ranks"), **PATIENCE)
    fit(strategy, module, data, world_size, max_epochs=ROUNDS, limit_val_batches=0)
    parts = [[data.part(r, world_size, s).node_arrays["n_id"] for r in range(world_size)] for s in range(ROUNDS + 1)]
    return {name: value for name, value in state_of(module).items() if not name.startswith("accuracy")}, parts


def by_hand(parts: list[list[Tensor]]) -> State:
    """Drift correction with anchors of the round's own parts, in training mode, statistics put back."""
    graph, replicas = double_graph(), [normed() for _ in parts[0]]

    for nodes in parts[:ROUNDS]:
        own = [gradient_among(copy.deepcopy(net), graph, part) for net, part in zip(replicas, nodes, strict=True)]
        shared = [sum(tensors) / len(replicas) for tensors in zip(*own, strict=True)]
        for net, part, anchor in zip(replicas, nodes, own, strict=True):
            for step in range(STEPS):
                moves = zip(net.parameters(), gradient_among(net, graph, part), shared, anchor, strict=True)
                for parameter, g, whole, mine in moves:
                    parameter.data -= 0.1 * (g + 0.8**step * (whole - mine))
        for tensors in zip(*([*net.parameters(), *net.norm.buffers()] for net in replicas), strict=True):
            mean = torch.stack([tensor.data.double() for tensor in tensors]).mean(0)
            for tensor in tensors:
                tensor.data.copy_(mean)
    return state_of(replicas[0])


@pytest.mark.parametrize(
    ("world_size", "residency"),
    [(3, lgd.Fixed()), pytest.param(2, lgd.Redeal(7), marks=pytest.mark.slow)],
    ids=["norms", "parts that change"],
)
def test_rounds_with_drift_are_those_by_hand(world_size: int, residency: Any) -> None:
    state, parts = run_ranks(in_rounds, world_size, residency)[0]
    expected = by_hand(parts)
    assert max(float((state[name] - expected[name]).abs().max()) for name in state) < 1e-13


class Functional(SAGE):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows = torch.nn.Linear(12, 400, bias=False)

    def forward(self, batch: Any) -> Tensor:
        batch.x = batch.x + functional.embedding(batch.n_id, self.rows.weight, sparse=True)
        return super().forward(batch)


def test_sparse_gradients_of_no_table_are_explained() -> None:
    with pytest.raises(ValueError, match=r"shape \(400, 12\) has a sparse gradient, .*sparse=False"):
        fit(lgd.LLCGStrategy(**PATIENCE), model(Functional), data_module(), 1)


def test_a_drift_that_says_nothing_is_towards_what_the_strategy_knows_best() -> None:
    assert lgd.LLCGStrategy(drift=lgd.Drift(decay=0.9)).drift == lgd.Drift("global", decay=0.9)
    assert lgd.LocalSGDStrategy(drift=lgd.Drift()).drift == lgd.Drift("ranks")


def test_local_sgd_offers_no_global_drift() -> None:
    with pytest.raises(ValueError, match=r"^LocalSGDStrategy knows no gradient of the whole graph, .* use Drift"):
        lgd.LocalSGDStrategy(drift=lgd.Drift("global"))


# A correction's loss is that of the user's own step: which steps give one, and what is said of the others.


def spectral(make: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        module: torch.nn.Module = make(torch.nn.Linear(3, 3))
    return module


class OwnNorm(torch.nn.Module):
    """Batch statistics in training, kept ones after it, and no name that anybody knows."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.full((3,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
            return x - x.mean(0)
        return x - self.center


class Types(pyg.HeteroBatchNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.arange(len(x)) % 2)


DEPENDS_ON_THE_BATCH = {
    "batch norm": lambda: torch.nn.BatchNorm1d(3),
    "of PyG": lambda: pyg.BatchNorm(3),
    "inside another": lambda: pyg.DiffGroupNorm(3, groups=2),
    "by type": lambda: Types(3, 2),
    "instance norm": lambda: pyg.InstanceNorm(3, affine=True, track_running_stats=True),
    "spectral norm": lambda: spectral(torch.nn.utils.parametrizations.spectral_norm),
    "old spectral norm": lambda: spectral(torch.nn.utils.spectral_norm),
    "the user's own": OwnNorm,
}
DRAWS = {
    "dropout": lambda: torch.nn.Dropout(0.5),
    "alpha dropout": lambda: torch.nn.AlphaDropout(0.5),
    "slopes": lambda: torch.nn.RReLU(),
}


def outputs_in(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """In training mode, and where gradients are measured, both from the same buffers; none of which have moved."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(module)(x)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with without_noise(module):
        found = module(x)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    assert all(child.training for child in module.modules())
    return expected, found


@pytest.mark.parametrize("kind", DEPENDS_ON_THE_BATCH)
def test_what_depends_on_the_batch_is_as_in_a_local_step(kind: str) -> None:
    expected, found = outputs_in(DEPENDS_ON_THE_BATCH[kind]())
    assert torch.equal(expected, found)


@pytest.mark.parametrize("kind", DRAWS)
def test_what_draws_noise_draws_none(kind: str) -> None:
    module = DRAWS[kind]()
    _, found = outputs_in(module)
    assert torch.equal(outputs_in(module)[1], found)


def test_attention_is_not_dropped_and_a_frozen_norm_stays_frozen() -> None:
    module = torch.nn.ModuleDict({"conv": pyg.GATConv(3, 3, dropout=0.5), "norm": torch.nn.BatchNorm1d(3)})
    module["norm"].eval()
    with without_noise(module):
        assert not module["conv"].training and not module["norm"].training
    assert module["conv"].training and not module["norm"].training


class NormedSeeds(SAGE):
    """A norm over the seeds alone: a batch of one seed has no variance."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, batch: Any) -> Tensor:
        batch.x = 2 * batch.x  # twice would be too much
        return self.norm(super().forward(batch))


def test_a_batch_of_one_seed_is_normalised_by_kept_statistics() -> None:
    found: list[list[Tensor]] = []

    class Watch(lgd.LLCGStrategy):
        def end_round(self) -> None:
            data = self._module().trainer.datamodule  # type: ignore[attr-defined]
            for in_eval_mode in (False, True):
                self._module().norm.train(not in_eval_mode)  # type: ignore[union-attr,operator]
                found.append(mean_gradient(self.meeting.fit, data.correction_batches(0, stop=2))[0])
                self._module().norm.train()  # type: ignore[union-attr,operator]
            super().end_round()

    module, data = model(NormedSeeds), data_module(global_batching=lgd.GlobalBatching(batch_size=1))
    fit(Watch(lgd.EverySteps(1), **PATIENCE), module, data, 1, max_epochs=1)
    assert module.norm.training
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


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
    own = model(kind)
    strategy = lgd.LLCGStrategy(lgd.EverySteps(2), correction=lgd.Correction(2), drift=None, **PATIENCE)
    fit(strategy, own, data_module(), world_size)
    return own.corrections, state_of(own)


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
    loss = loss_of(module, batch)
    assert loss is not None and loss.requires_grad
    fit("auto", module, data, 1, fast_dev_run=1)


class Gathers(SAGE):
    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        assert self.all_gather(loss.detach()).shape == (2,)
        return loss


def gathering(rank: int, world_size: int, correction: Any) -> None:
    strategy = lgd.LLCGStrategy(lgd.EverySteps(2), correction=correction, **PATIENCE)
    fit(strategy, model(Gathers), data_module(), world_size)


@pytest.mark.filterwarnings("ignore:.*functional.all_gather is deprecated")
def test_an_exchange_is_fine_where_all_correct_and_refused_where_one_does() -> None:
    run_ranks(gathering, 2, lgd.Correction())
    with pytest.raises(RankError, match=r'exchanges inside a correction: with Correction\(way="rank0"\)'):
        run_ranks(gathering, 2, lgd.Correction(way="rank0"))


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
    def correction_step(self, batch: Any) -> None: ...


class TwoArguments(SAGE):
    def correction_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch)


SKIPS = r"correction_step\(\) returned None for every batch"
REFUSED: list[tuple[type[SAGE], dict[str, Any], str]] = [
    (Vector, {}, r"correction_step\(\) returned a tensor of shape \(\d,\), but a correction needs the mean loss"),
    (Detached, {}, r"correction_step\(\) returned a loss without a gradient, detached"),
    (Number, {}, r"correction_step\(\) returned a float, .* with its gradient: return that\."),
    (NoLoss, {}, r"training_step\(\) returned a dict, .* or define correction_step\(batch\)"),
    (Backward, {}, r"correction_step\(\) must return the loss and leave backward\(\) to the strategy"),
    (TwoArguments, {}, r"correction_step\(batch\) is called with the batch alone: missing .*'batch_idx'"),
    *((Skips, options, SKIPS) for options in ({}, {"drift": None}, {"correction": lgd.Correction(way="rank0")})),
]


def refused(rank: int, world_size: int) -> list[str]:
    found = []
    for kind, options, _ in REFUSED:
        strategy = lgd.LLCGStrategy(lgd.EverySteps(1), **options, **PATIENCE)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            fit(strategy, model(kind), data_module(batch_size=6), world_size)
        found.append(str(caught.value))
    return found


def test_a_step_without_a_loss_is_named() -> None:
    for found in run_ranks(refused, 2):
        for said, (kind, _, message) in zip(found, REFUSED, strict=True):
            assert re.search(message, said), (kind, said)
