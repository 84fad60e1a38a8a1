"""Drift correction by gradients that are computed anyway is what twenty lines make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import (
    Correction,
    Drift,
    EverySteps,
    Graph,
    Isolated,
    LLCGStrategy,
    LocalSGDStrategy,
    Partition,
    PartitionedDataModule,
    WholePartSampler,
)
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.rounds.decay import decay_by_hand
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import fit, small_graph

RANKS, ROUNDS, STEPS, SILENT = 3, 4, 3, 1  # in round 1, rank 1 learns from no batch
OF_RANKS = (Drift("ranks", anchor_steps=0), None)
OF_GRAPH = (Drift("global", anchor_steps=0), Correction(2, optimizer="sgd", lr=0.05))


class Skipping(SAGE):
    """In float64. A loss of skipped batches has no gradient, and that of a correction always has one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(12, 4, blocks=False)
        self.double()

    def layers(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def correction_step(self, batch: Any) -> Tensor:
        seeds = slice(batch.batch_size)
        return functional.cross_entropy(self(batch), batch.y[seeds])

    def training_step(self, batch: Any) -> Tensor:
        is_silent = self.global_rank == self.trainer.strategy.state.round_idx == SILENT
        return torch.zeros((), requires_grad=True) if is_silent else self.correction_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def double_graph() -> Graph:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    return graph


ASSIGNMENT = (torch.arange(400).sqrt() / 20 * RANKS).int()  # parts of unequal sizes


def fitted(rank: int, world_size: int, settings: Any, folder: str) -> tuple[State, State, list[float]]:
    """The weights of a fit, of another that goes on from its second round, and gradients of all ranks in each round."""
    (drift, correction), states, counted = settings, [], []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        data = PartitionedDataModule(
            double_graph(),
            partitioner=Partition(ASSIGNMENT, RANKS),
            sampler=WholePartSampler(2),
            batch_size=10**6,
            boundary=Isolated(),
        )
        clock, options = EverySteps(STEPS), {"drift": drift, "outer": None, "weights": "nodes", **PATIENCE}
        options |= {"average_optimizer": False} | ({} if correction is None else {"correction": correction})
        strategy = (LocalSGDStrategy if correction is None else LLCGStrategy)(clock, **options)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        module = Skipping()
        run = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": ROUNDS, "limit_val_batches": 0}
        trainer = fit(strategy, module, data, world_size, path, **run)
        states.append(state_of(module))
        counted.append(float(trainer.callback_metrics["round/gradients"]))
    return states[0], states[1], counted


def by_hand(drift: Drift, correction: Correction | None) -> State:
    graph, replicas = double_graph(), [Skipping() for _ in range(RANKS)]
    x, y, train = (graph.node_arrays[name] for name in ("x", "y", "train_mask"))
    edges = torch.stack([graph.indices.long(), torch.arange(400).repeat_interleave(graph.degrees())])
    inside = ASSIGNMENT[edges[0]] == ASSIGNMENT[edges[1]]

    def gradient(net: Skipping, nodes: Tensor, seen: Tensor) -> list[Tensor]:
        logits = net.layers(x, edges[:, seen])[train & nodes]
        return [*torch.autograd.grad(functional.cross_entropy(logits, y[train & nodes]), list(net.parameters()))]

    parts = [rank == ASSIGNMENT for rank in range(RANKS)]
    weights = [int((train & part).sum()) / int(train.sum()) for part in parts]
    nothing = [torch.zeros_like(each) for each in replicas[0].parameters()]
    shifts, decays = [nothing] * RANKS, [0.8] * RANKS
    for round_idx in range(ROUNDS):
        own: list[Any] = []
        for rank, net in enumerate(replicas):
            own.append(None)
            for step in range(STEPS if not round_idx == rank == SILENT else 0):
                own[rank] = gradient(net, parts[rank], inside)
                for parameter, mine, shift in zip(net.parameters(), own[rank], shifts[rank], strict=True):
                    parameter.data -= 0.1 * (mine + decays[rank] ** step * shift)
        for tensors in zip(*(net.parameters() for net in replicas), strict=True):
            mean = sum(weight * each.data for weight, each in zip(weights, tensors, strict=True))
            for each in tensors:
                each.data.copy_(mean)
        known = [(weight, mine) for weight, mine in zip(weights, own, strict=True) if mine is not None]
        total = sum(weight for weight, _ in known)
        shared = [sum(w * m[i] for w, m in known) / total for i in range(len(nothing))]
        for _ in range(2 if correction else 0):
            shared = gradient(replicas[0], train, torch.ones_like(inside))
            for net in replicas:
                for parameter, whole in zip(net.parameters(), shared, strict=True):
                    parameter.data -= 0.05 * whole
        old = shifts
        shifts = [nothing if each is None else [s - m for s, m in zip(shared, each, strict=True)] for each in own]
        if correction:
            decays = [decay_by_hand(before, now) for before, now in zip(old, shifts, strict=True)]
    return state_of(replicas[0])


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize(("settings", "beyond"), [(OF_RANKS, 0), (OF_GRAPH, 2)], ids=["ranks", "graph"])
def test_rounds_are_those_by_hand(settings: Any, beyond: int, tmp_path: Path) -> None:
    expected = by_hand(*settings)
    for whole, again, gradients in run_ranks(fitted, RANKS, settings, str(tmp_path)):
        assert differs(whole, again) == 0.0
        assert max(float((whole[name] - expected[name]).abs().max()) for name in expected) < 1e-10
        assert gradients == [RANKS * (STEPS + beyond)] * 2


def test_gradients_that_nobody_computes_are_refused() -> None:
    for correction in (None, Correction(way="rank0")):
        with pytest.raises(ValueError, match=r'gradient of the whole graph from a correction of way="sliced"'):
            LLCGStrategy(drift=Drift(anchor_steps=0), correction=correction)
    with pytest.raises(ValueError, match=r"steps along the anchor of drift=.*, and drift is .*anchor_steps=0"):
        LLCGStrategy(drift=Drift(anchor_steps=0), correction=Correction(1, "anchor"))
