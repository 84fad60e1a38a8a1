"""Drift correction is what it says, on several gloo ranks and real parts."""

import copy
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from lightning_gnn_dist.rounds.drift import DriftCorrection
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.by_hand import Plain, double_graph, gradient_among
from tests.strategies.fitting import State, state_of
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


def test_at_the_anchor_every_rank_steps_along_the_global_gradient() -> None:
    for gradient, expected in run_ranks(shifted, 3, "global"):
        for left, right in zip(gradient, expected, strict=True):
            assert (left - right).abs().max() < 1e-5


@pytest.mark.slow
def test_at_the_anchor_every_rank_steps_along_the_mean_gradient() -> None:
    (first, expected), (second, _), (third, _) = run_ranks(shifted, 3, "ranks")
    for left, middle, right in zip(first, second, third, strict=True):
        assert (left - middle).abs().max() < 1e-6 and (left - right).abs().max() < 1e-6
    assert max(float((left - right).abs().max()) for left, right in zip(first, expected, strict=True)) > 1e-4


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


def test_shifts_towards_the_mean_of_ranks_fade_alike() -> None:
    weight, drift = torch.zeros(1, requires_grad=True), DriftCorrection(lgd.Drift("ranks"))
    for _ in range(2):
        drift.anchor_at([weight], [torch.ones(1)], [torch.zeros(1)])
    assert drift.state()["drift"]["decay"] == 0.8


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


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
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
