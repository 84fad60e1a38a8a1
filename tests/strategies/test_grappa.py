"""Laws of Grappa, on several gloo ranks: what its steps are, what it sends, and what it refuses."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_gnn_dist import Coverage, Graph, GrappaStrategy, Launch, NeighborSampler, Partition
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import plain_ddp
from tests.placing import batches_of
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, differs, fit, hear, state_of
from tests.strategies.weighted_fitting import Model, data_of, grappa, trainer_of

# Law 2: at full coverage Grappa is DDP. Law 1: alone it is plain Lightning.


def ddp_and_grappa(rank: int, world_size: int) -> list[list[State]]:
    found = []
    for options in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}):
        found.append(list[State]())
        for strategy in (plain_ddp(), grappa()):
            torch.manual_seed(0)
            module = Net(optimizer="Adam")
            fit(rank, strategy, module, devices=world_size, **options)  # type: ignore[arg-type]
            found[-1].append(state_of(module))
    return found


def test_batches_without_coverage_make_it_ddp() -> None:
    for found in run_ranks(ddp_and_grappa, 2):
        assert [differs(ddp, ours) for ddp, ours in found] == [0.0] * 3


# The weighted gradient is the central one.


def central_step(weights: str, level: str, world_size: int) -> State:
    """One SGD step along sum(w g) / sum(w), from the parts as a single process can build them."""
    data = data_of(coverage=Coverage(level=level), **CUT)  # type: ignore[arg-type]
    module, total, whole = Model(), 0.0, []
    for rank in range(world_size):
        part = data.part(rank, world_size)
        loader = batches_of(data, part, 1, 0, 0, 1)
        (batch,) = loader
        losses = functional.cross_entropy(module(batch), batch.y[: batch.batch_size], reduction="none")
        own = batch.coverage[: batch.batch_size]
        if level == "batch":
            own = own.mean().expand(batch.batch_size)
        if weights == "nodes":
            own = own / own.sum() * batch.batch_size  # the module weighs nodes, the strategy counts them
        if weights == "uniform":
            own = own / own.sum()
        gradients = torch.autograd.grad((losses * own).sum(), list(module.parameters()))
        whole.append(gradients)
        total += float(own.sum())
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter -= 0.1 * sum(gradients[place] for gradients in whole) / total
    return state_of(module)


def uneven() -> Partition:
    """Three parts of very different size, so that counts of seeds differ too."""
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(600, generator=generator)
    return Partition(((share > 0.15).int() + (share > 0.4).int()).int(), 3)


CUT: dict[str, Any] = {"partitioner": uneven()}


# How ranks and nodes count, and whether the module weighs nodes: one that does not is weighed batch by batch.
WAYS = [(*way, True) for way in (("coverage", "node"), ("coverage", "batch"), ("nodes", "node"), ("uniform", "node"))]
WAYS.append(("coverage", "node", False))


def steps(rank: int, world_size: int) -> list[State]:
    states = []
    for weights, level, weighs_nodes in WAYS:
        module = Model(weighs_nodes=weighs_nodes)
        data = data_of(coverage=Coverage(level=level), **CUT)  # type: ignore[arg-type]
        trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def test_a_step_is_the_central_weighted_step() -> None:
    expected = [central_step(weights, level if weighs else "batch", 3) for weights, level, weighs in WAYS]
    for states in run_ranks(steps, 3):
        for state, central, way in zip(states, expected, WAYS, strict=True):
            assert differs(state, central) < 1e-6, way


def two_sides(*, inner_edge: bool) -> Graph:
    """Two sides of twenty nodes, with edges from each to the other, and one that is not cut."""
    side = torch.arange(20)
    ends = [torch.stack([side, side + 20]), torch.stack([side + 20, side])]
    if inner_edge:
        ends.append(torch.tensor([[20, 21], [21, 20]]))
    arrays = {"x": torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), "y": torch.arange(40) % 4}
    arrays["train_mask"] = torch.ones(40, dtype=torch.bool)
    return Graph.from_edge_index(torch.cat(ends, 1), 40, arrays)


SIDES = Partition((torch.arange(40) >= 20).int(), 2)


def steps_of_sides(rank: int, world_size: int) -> list[State]:
    states = []
    for weights, weighs_nodes, inner_edge in UNCOVERED:
        module = Model(weighs_nodes=weighs_nodes)
        data = data_of(two_sides(inner_edge=inner_edge), partitioner=SIDES)
        trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def plain_step(inner_edge: bool, graph: Graph | None = None, by_class: Tensor | None = None) -> State:
    """One step along the plain mean of all losses."""
    graph, losses = two_sides(inner_edge=inner_edge) if graph is None else graph, []
    data, module = data_of(graph, partitioner=SIDES), Model()
    for rank in range(2):
        (batch,) = batches_of(data, data.part(rank, 2), 1, 0, 0, 1)
        y = batch.y[: batch.batch_size]
        losses.append(functional.cross_entropy(module(batch), y, weight=by_class, reduction="none"))
    gradients = torch.autograd.grad(torch.cat(losses).mean(), list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    return state_of(module)


# Where nothing is covered all nodes count alike, as they do where coverage is not asked for.
UNCOVERED = [("coverage", True, False), ("coverage", False, False), ("nodes", False, True), ("uniform", False, True)]


def test_a_rank_without_coverage_counts_by_its_nodes() -> None:
    for states in run_ranks(steps_of_sides, 2):
        for state, (*_, inner_edge) in zip(states, UNCOVERED, strict=True):
            assert differs(state, plain_step(inner_edge=inner_edge)) < 1e-6


BY_CLASS = torch.tensor([4.0, 1.0, 1.0, 0.5])


class Classes(Model):
    """Weighs classes, and reduces the losses of a batch in one of three ways."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def training_step(self, batch: Any) -> Tensor:
        y, reduction = batch.y[: batch.batch_size], self.reduction
        losses = functional.cross_entropy(self(batch), y, weight=BY_CLASS, reduction=reduction)
        return losses.mean() if reduction == "none" else losses


def unlike_sides() -> Graph:
    """Each side has two classes alone."""
    graph = two_sides(inner_edge=True)
    graph.node_arrays["y"] = torch.arange(40) // 10
    return graph


def steps_by_class(rank: int, world_size: int) -> list[State]:
    states = []
    for reduction in ("none", "mean", "sum"):
        module = Classes(reduction)
        data = data_of(unlike_sides(), partitioner=SIDES)
        trainer_of(world_size, grappa(weights="nodes"), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def test_a_mean_over_seeds_weighs_classes_as_one_process_does() -> None:
    expected = plain_step(inner_edge=True, graph=unlike_sides(), by_class=BY_CLASS)
    for right, *wrong in run_ranks(steps_by_class, 2):
        assert differs(right, expected) < 1e-6
        assert all(differs(state, expected) > 1e-3 for state in wrong)  # other steps than a step of one process


def said(rank: int, world_size: int, weighs_nodes: bool, options: dict[str, Any]) -> list[str]:
    """What two fits of two epochs say."""
    lines, trainer = hear(), trainer_of(world_size, grappa(), **options)
    other_side = Partition((torch.arange(40) < 20).int(), 2)
    for max_epochs in (2, 4):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(Model(weighs_nodes=weighs_nodes), data_of(two_sides(inner_edge=True), partitioner=other_side))
    return [line for line in lines if "coverage" in line]


@pytest.mark.parametrize(
    ("weighs_nodes", "options", "line"),
    [
        (False, {"accumulate_grad_batches": 4}, "whole batches are weighed"),
        (True, {}, "without a neighbour in their part: 38 of 40"),
    ],
)
def test_what_is_weighed_is_said_once_a_fit(weighs_nodes: bool, options: dict[str, Any], line: str) -> None:
    lines, of_rank_1 = run_ranks(said, 2, weighs_nodes, options)
    assert len(lines) == 2 and all(line in one for one in lines)
    assert not of_rank_1


# What it sends.


def sent(rank: int, world_size: int) -> tuple[float, float]:
    module, before = Model(), collectives.traffic.bytes_sent
    counts = []

    class Count(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            counts.append(collectives.traffic.bytes_sent - before)

    trainer = trainer_of(world_size, grappa(), callbacks=[Count()], max_epochs=3)
    trainer.fit(module, data_of(batch_size=30, sampler=NeighborSampler([4, 4])))
    values, steps = sum(p.numel() for p in module.parameters()), len(module.seen) // 3
    ring = 2 * (world_size - 1) / world_size
    return counts[2] - counts[1], ring * steps * (4 * values + 8 * 5) + (world_size - 1) * 8 * 3


def test_an_epoch_sends_gradients_five_numbers_a_step_and_three_at_its_end() -> None:
    for measured, expected in run_ranks(sent, 2):
        assert measured == expected


# What is refused.


def with_unused_parameters(rank: int, world_size: int) -> None:
    module = Model()
    module.unused = nn.Linear(2, 2)
    trainer_of(world_size, grappa()).fit(module, data_of(batch_size=30))


def test_unused_parameters_are_told_of_with_the_way_out() -> None:
    with pytest.raises(RankError, match=r"use GrappaStrategy\(find_unused_parameters=True\)"):
        run_ranks(with_unused_parameters, 2)


def test_backends_of_several_devices_are_known() -> None:
    assert GrappaStrategy(launch=Launch(backend="cpu:gloo"))._process_group_backend == "cpu:gloo"
