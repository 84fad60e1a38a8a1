"""A small version of ``benchmarks/serve.py``: nothing is lost or answered wrong under a load that misbehaves."""

import asyncio
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Evaluation, Graph, LinkDataModule, LinkSplit, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.cli.demo import SAGE
from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.links import LinkAnswerer, Ranked
from lightning_gnn_dist.extensions.serving.question import Limits
from tests.conftest import module_of
from tests.extensions.serving.served import serving
from tests.extensions.serving.test_links import quiet
from tests.pages import ROOT

NODES, FEATURES = 3000, 8


class Linked(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, 16), SAGEConv(16, 16)])

    def layers(self) -> Any:
        first, last = self.convs
        return [lambda batch: first(batch.x, batch.edge_index).relu(), lambda batch: last(batch.x, batch.edge_index)]


def answerer_of_rows(limits: Limits) -> Answerer:
    edges, x = torch.randint(0, NODES, (2, 60_000)), torch.randn(NODES, FEATURES)
    arrays = {"x": x, "y": torch.zeros(NODES).long(), "train_mask": torch.ones(NODES).bool()}
    evaluation = Evaluation(sampler=NeighborSampler([15, 10]))
    data = PartitionedDataModule(Graph.from_edge_index(edges, NODES, arrays), evaluation=evaluation)
    return Answerer(quiet(), SAGE(FEATURES, 4), data, limits, 1000)


def answerer_of_links(limits: Limits) -> LinkAnswerer:
    graph = Graph.from_edge_index(torch.randint(0, NODES, (2, 60_000)), NODES, {"x": torch.randn(NODES, FEATURES)})
    data, how = LinkDataModule(LinkSplit(graph, {}, undirected=False)), Ranked("dot", ("edges", "self"), 64 << 20)
    return LinkAnswerer(quiet(), Linked(), data, limits, 1000, how)


@pytest.mark.parametrize("asked", ["rows", "links"])
def test_nothing_is_lost_or_answered_wrong(asked: str) -> None:
    serve: Any = module_of(ROOT / "benchmarks" / "serve.py")
    torch.manual_seed(0)
    limits = Limits(waiting=24)
    answerer = answerer_of_rows(limits) if asked == "rows" else answerer_of_links(limits)
    bodies = (serve.requests if asked == "rows" else serve.link_requests)(NODES, 40, FEATURES)

    async def run(port: int) -> None:
        known = await serve.answers_to(port, bodies)
        found = await serve.load(port, bodies, known, 400, num_clients=12)
        assert found.statuses == {200: 378, 400: 20} and found.left == 2 and found.wrong == 0
        assert found.difference < 1e-5
        assert await serve.metric(port, "waiting") == 0
        assert await serve.metric(port, "requests_together_count") < 378 + 2 + len(bodies)  # some were together
        statuses = await serve.burst(port, bodies[0], 100)
        assert statuses.keys() == {200, 503} and statuses.total() == 100 and statuses[200] >= 24

    with serving(answerer, limits) as (port, _):
        asyncio.run(run(port))
