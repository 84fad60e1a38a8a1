"""A round of LLCG as it is by default, against one by hand, and what it sends beside Grappa."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Drift,
    EverySteps,
    GlobalBatching,
    Graph,
    GrappaStrategy,
    Isolated,
    LLCGStrategy,
    NeighborSampler,
    Outer,
    Partition,
    PartitionedDataModule,
    WholePartSampler,
)
from lightning_gnn_dist.wire.collectives import traffic
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.rounds.means.agreement import agreement
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import data_module, fit, model, small_graph

RANKS, STEPS, ROUNDS = 3, 3, 3
EXACT = Outer(momentum=0.8, adaptive=True)  # the default, but for its bits


class Plain(SAGE):
    """In float64. Remembers also the seeds of steps outside the loop."""

    def __init__(self, optimizer: str = "Adam") -> None:
        super().__init__(12, 4, blocks=False)
        self.optimizer = optimizer
        self.measured: list[Tensor] = []
        self.double()

    def correction_step(self, batch: Any) -> Tensor:
        self.measured.append(batch.n_id[: batch.batch_size].clone())
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def logits(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def forward(self, batch: Any) -> Tensor:
        return self.logits(batch.x, batch.edge_index)[: batch.batch_size]

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)


def plain(optimizer: str = "Adam") -> Plain:
    torch.manual_seed(0)
    return Plain(optimizer)


def double_graph() -> tuple[Graph, Partition]:
    """A graph, and parts of 44, 133 and 223 nodes."""
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    return graph, Partition((torch.arange(400).sqrt() / 20 * RANKS).int(), RANKS)


@dataclass(frozen=True)
class Setting:
    """What differs from the default. With two seeds in its batches a correction leaves one of three ranks without."""

    steps: int = STEPS
    outer: Outer = EXACT
    optimizer: str = "Adam"
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    batch_size: int = 10**6
    seeds_of_correction: int = 10**6


SETTINGS = (
    Setting(),
    Setting(12),
    Setting(optimizer="RMSprop", moments=("square_avg",), batch_size=4, seeds_of_correction=2),
    Setting(12, Outer(momentum=0.5), "SGD", (), 4, 20),
)


Seeds = list[Tensor]  # of one call after the other


def in_rounds(rank: int, world_size: int, settings: list[Setting]) -> list[tuple[State, Seeds, Seeds]]:
    """For each setting the state after some rounds, and the seeds of this rank's local steps and of others."""
    found = []
    for setting in settings:
        graph, partition = double_graph()
        whole, everyone = setting.batch_size == 10**6, NeighborSampler([-1, -1])
        data = PartitionedDataModule(
            graph,
            partitioner=partition,
            sampler=WholePartSampler(2) if whole else everyone,
            batch_size=setting.batch_size,
            boundary=Isolated(),
            global_batching=GlobalBatching(batch_size=setting.seeds_of_correction, sampler=everyone),
        )
        module = plain(setting.optimizer)
        drift = Drift(anchor_steps=1)
        strategy = LLCGStrategy(EverySteps(setting.steps), outer=setting.outer, drift=drift, **PATIENCE)
        fit(strategy, module, data, world_size, max_epochs=ROUNDS, limit_val_batches=0)
        state = {name: value for name, value in state_of(module).items() if not name.startswith("accuracy")}
        found.append((state, module.trained, module.measured))
    return found


def by_hand(setting: Setting, local: list[Seeds], others: list[Seeds]) -> State:
    """Local steps that are shifted, a mean with momentum, moments averaged, one correction step for ten.

    The shift is from the first gradient of the rank's round to the last one of the correction before; at first, to the
    gradient of a batch of the graph. It fades the more slowly the more rounds agree.
    """
    corrections, (graph, partition) = math.ceil(setting.steps / 10), double_graph()
    x, y, train = (graph.node_arrays[name] for name in ("x", "y", "train_mask"))
    edges = torch.stack([graph.indices.long(), torch.arange(400).repeat_interleave(graph.degrees())])

    def gradient(net: Plain, nodes: Tensor, seeds: Tensor) -> list[Tensor]:
        inside = edges[:, torch.isin(edges, nodes).all(0)]
        logits = net.logits(x, inside)[seeds]
        return list(torch.autograd.grad(functional.cross_entropy(logits, y[seeds]), net.parameters()))

    def step(optimizer: Any, gradients: list[Tensor]) -> None:
        for parameter, each in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = each
        optimizer.step()

    everyone, parts = torch.arange(400), [partition.nodes(rank) for rank in range(RANKS)]
    share = [int(train[nodes].sum()) / int(train.sum()) for nodes in parts]
    locally, outside = [iter(each) for each in local], [iter(each) for each in others]
    mean, nets = plain(setting.optimizer), [plain(setting.optimizer) for _ in parts]
    optimizers = [net.configure_optimizers() for net in nets]
    corrector = mean.configure_optimizers()
    corrector.param_groups[0]["lr"] = 0.01 / corrections**0.75
    speed = [torch.zeros_like(p) for p in mean.parameters()]
    old, decay = list[Tensor](), 0.8

    def of_graph() -> list[Tensor]:
        drawn = [next(batches) for batches in outside[: setting.seeds_of_correction]]
        return gradient(mean, everyone, torch.cat(drawn))

    whole = of_graph()
    for _ in range(ROUNDS):
        for net, nodes, optimizer, batches in zip(nets, parts, optimizers, locally, strict=True):
            net.load_state_dict(mean.state_dict())
            first: list[Tensor] = []
            for number in range(setting.steps):
                own = gradient(net, nodes, next(batches))
                first = first or own
                step(optimizer, [g + decay**number * (a - b) for g, a, b in zip(own, whole, first, strict=True)])
        ends = [list(net.parameters()) for net in nets]
        ways = [
            (parameter - sum(w * end[place] for w, end in zip(share, ends, strict=True))).detach()
            for place, parameter in enumerate(mean.parameters())
        ]
        agreed = agreement(ways, old) ** 4 if setting.outer.adaptive else 0.0
        momentum, decay = setting.outer.momentum * (agreed if setting.outer.adaptive else 1), 1 - 0.2 * (1 - agreed)
        old = ways
        for place, (parameter, way) in enumerate(zip(mean.parameters(), ways, strict=True)):
            speed[place] = momentum * speed[place] + way
            parameter.data -= speed[place]
            states = [each.state[list(net.parameters())[place]] for net, each in zip(nets, optimizers, strict=True)]
            for moment in setting.moments:
                shared = sum(w * state[moment] for w, state in zip(share, states, strict=True))
                for state in states:
                    state[moment] = shared.clone()
            corrector.state[parameter] = copy.deepcopy(states[0])
        for _ in range(corrections):
            whole = of_graph()
            step(corrector, [each.clone() for each in whole])
    assert all(next(batches, None) is None for batches in (*locally, *outside))
    return state_of(mean)


def test_rounds_are_those_by_hand_and_nearly_so_in_fewer_bits() -> None:
    rounded = replace(SETTINGS[0], outer=replace(EXACT, bits=8))
    found = run_ranks(in_rounds, RANKS, [*SETTINGS, rounded])
    for number, setting in enumerate(SETTINGS):
        local, others = ([of_rank[number][which] for of_rank in found] for which in (1, 2))
        expected = by_hand(setting, local, others)
        for of_rank in found:
            state = of_rank[number][0]
            assert max(float((state[name] - expected[name]).abs().max()) for name in state) < 1e-11, setting
    start, exact, fewer = state_of(plain()), found[0][0][0], found[0][-1][0]
    assert all(differs(of_rank[-1][0], fewer) == 0.0 for of_rank in found)
    # Adam's first steps are as long for a gradient near zero, whose sign rounding may change.
    away = sum(float((fewer[name] - exact[name]).square().sum()) for name in exact)
    assert 0 < away < 0.02 * sum(float((start[name] - exact[name]).square().sum()) for name in exact)


def sent(rank: int, world_size: int) -> list[float]:
    """Bytes of a local step of Grappa, and of LLCG in rounds of ten and of fifty."""
    counted = []
    strategies = [GrappaStrategy(**PATIENCE), *(LLCGStrategy(EverySteps(steps), **PATIENCE) for steps in (10, 50))]
    for strategy, epochs in zip(strategies, (4, 3, 1), strict=True):
        marks: list[float] = []
        module = model(Wide)
        module.on_train_epoch_start = lambda marks=marks: marks.append(traffic.bytes_sent)
        module.on_train_end = lambda marks=marks: marks.append(traffic.bytes_sent)
        trainer = fit(strategy, module, data_module(), world_size, max_epochs=epochs, limit_val_batches=0)
        counted.append((marks[-1] - marks[0]) / trainer.global_step)
    return counted


class Wide(SAGE):
    """Has enough weights, so that other messages are small beside them."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(num_features, num_classes)
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, 512), SAGEConv(512, num_classes)])


@pytest.mark.slow
def test_it_sends_a_sixth_of_grappa_at_ten_steps_and_an_eighteenth_at_fifty() -> None:
    for every_step, tens, fifties in run_ranks(sent, 2):
        assert tens < 0.17 * every_step
        assert fifties < every_step / 18  # four corrections more


def exchanges_of_rounds(rank: int, world_size: int) -> list[int]:
    marks, calls = list[int](), list[Any]()

    def counted(call: Any) -> Any:
        return lambda *args, **options: (calls.append(call), call(*args, **options))[1]

    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast"):
        setattr(dist, name, counted(getattr(dist, name)))  # this process runs nothing else
    module = model()
    module.on_train_epoch_start = lambda: marks.append(len(calls))
    fit(LLCGStrategy(EverySteps(2), **PATIENCE), module, data_module(), world_size, max_epochs=4, limit_val_batches=0)
    return [after - before for before, after in pairwise(marks)]


def test_a_round_takes_seven_exchanges() -> None:
    """Two tell numbers, one sums what is not rounded; replicas with moments, and the correction, take two each."""
    assert run_ranks(exchanges_of_rounds, 2) == [[7, 7, 7]] * 2
