"""Drift correction is what it says, on several gloo ranks and real parts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.datamodule import PartitionedDataModule
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.rounds import EverySteps
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.strategies.drift import DriftCorrection
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import PATIENCE, data_module, fit, model, small_graph


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


def test_local_sgd_offers_no_global_drift() -> None:
    with pytest.raises(ValueError, match=r"drift must be one of \['ranks', None\], got 'global'"):
        LocalSGDStrategy(drift="global")  # type: ignore[arg-type]
