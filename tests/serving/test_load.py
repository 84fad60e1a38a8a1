"""A small version of ``benchmarks/serve.py``: nothing is lost or answered wrong under a load that misbehaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import Evaluation, Graph, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.cli.demo import SAGE
from lightning_gnn_dist.serving.answering import Answerer
from lightning_gnn_dist.serving.limits import Limits
from tests.serving.served import serving

NODES, FEATURES = 3000, 8


def test_nothing_is_lost_or_answered_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import serve  # type: ignore[import-not-found]

    torch.manual_seed(0)
    edges, x = torch.randint(0, NODES, (2, 60_000)), torch.randn(NODES, FEATURES)
    arrays = {"x": x, "y": torch.zeros(NODES).long(), "train_mask": torch.ones(NODES).bool()}
    evaluation = Evaluation(sampler=NeighborSampler([15, 10]))
    data = PartitionedDataModule(Graph.from_edge_index(edges, NODES, arrays), evaluation=evaluation)
    trainer, limits = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), Limits(waiting=24)
    answerer = Answerer(trainer, SAGE(FEATURES, 4), data, limits, 1000)
    bodies = serve.requests(NODES, 40, FEATURES)

    async def run(port: int) -> None:
        rows = await serve.rows_of(port, bodies)
        found = await serve.load(port, bodies, rows, 400, num_clients=12)
        assert found.statuses == {200: 378, 400: 20} and found.left == 2 and found.wrong == 0
        assert found.difference < 1e-5
        assert await serve.metric(port, "waiting") == 0
        assert await serve.metric(port, "requests_together_count") < 378 + 2 + len(bodies)  # some were together
        statuses = await serve.burst(port, bodies[0], 100)
        assert statuses.keys() == {200, 503} and statuses.total() == 100 and statuses[200] >= 24

    with serving(answerer, limits) as (port, _):
        asyncio.run(run(port))
