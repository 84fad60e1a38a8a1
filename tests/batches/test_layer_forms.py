"""The table of docs/batches.md: the form in which each layer of PyG computes on a block, its exactness and its cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from torch_geometric import nn

import lightning_gnn_dist as lgd
from tests.pages import ROOT

GRAPH = lgd.communities(400, 4, num_features=8, train_share=0.1)
GRAPH.edge_arrays["edge_attr"] = torch.rand(GRAPH.num_edges, 3, generator=torch.Generator().manual_seed(0))
WITH_EDGES = ("GINEConv", "NNConv", "GMMConv")
OTHERS: dict[str, Callable[[], Any]] = {
    "GATConv": lambda: nn.GATConv(8, 5, heads=2),
    "GATv2Conv": lambda: nn.GATv2Conv(8, 5, heads=2),
    "TransformerConv": lambda: nn.TransformerConv(8, 5, heads=2),
    "GeneralConv": lambda: nn.GeneralConv(8, 5, heads=2, attention=True),
    "GCNConv(normalize=False)": lambda: nn.GCNConv(8, 5, normalize=False),
    "GINConv": lambda: nn.GINConv(Linear(8, 5)),
    "GINEConv": lambda: nn.GINEConv(Linear(8, 5), edge_dim=3),
    "EdgeConv": lambda: nn.EdgeConv(Linear(16, 5)),
    "PNAConv": lambda: nn.PNAConv(8, 5, ["mean", "max"], ["identity"], deg=torch.tensor([1, 5, 9])),
    "NNConv": lambda: nn.NNConv(8, 5, Linear(3, 40)),
    "GMMConv": lambda: nn.GMMConv(8, 5, dim=3, kernel_size=2),
    "MFConv": lambda: nn.MFConv(8, 5, max_degree=20),
    "ChebConv": lambda: nn.ChebConv(8, 5, K=2),
    "SGConv": lambda: nn.SGConv(8, 5, K=1),
    "TAGConv": lambda: nn.TAGConv(8, 5, K=1),
    "APPNP": lambda: nn.APPNP(1, 0.1),
    "LGConv": nn.LGConv,
    "SimpleConv": nn.SimpleConv,
}
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in re.findall(r"^\| `\w+Conv.*$|^\| `APPNP.*$", (ROOT / "docs" / "batches.md").read_text(), re.MULTILINE)
]
SAID = {name: row[1:] for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.fixture(scope="module")
def batch() -> Any:
    data = lgd.PartitionedDataModule(GRAPH, sampler=lgd.NeighborSampler([-1]), batch_size=20)
    return next(iter(data.train_dataloader()))


def made(name: str) -> Any:
    torch.manual_seed(0)
    return (OTHERS[name] if name in OTHERS else lambda: getattr(nn, name)(8, 5))().eval()


def works(compute: Callable[[], Tensor], expected: Tensor) -> bool:
    with suppress(TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError):
        return torch.allclose(compute()[: len(expected)], expected, rtol=1e-4, atol=1e-5)
    return False


@pytest.mark.parametrize("name", SAID)
@torch.no_grad()
def test_a_layer_has_the_form_that_the_table_says(name: str, batch: Any) -> None:
    (block,), conv, seeds = batch.blocks, made(name), batch.n_id[: batch.batch_size]
    x, edges = (batch.x, batch.x[: block.num_dst]), [batch.edge_attr] if name in WITH_EDGES else []
    expected = conv(batch.x, batch.edge_index, *edges)[: batch.batch_size]
    on_edges = works(lambda: conv(x, block.edge_index, *edges), expected)
    on_adj = works(lambda: conv(x, block.adj), expected)
    form = "`block.adj`" if on_adj else "`block.edge_index`" if on_edges else "`batch.edge_index`"
    receivers = torch.arange(GRAPH.num_nodes).repeat_interleave(GRAPH.degrees())
    everything = torch.stack([GRAPH.indices.long(), receivers])
    all_edges = [GRAPH.edge_arrays["edge_attr"]] if edges else []
    whole = conv(GRAPH.node_arrays["x"], everything, *all_edges)[seeds]
    exact = "yes" if torch.allclose(expected, whole, rtol=1e-4, atol=1e-5) else "no"
    is_product = on_adj and conv.inspector.implements("message_and_aggregate")
    cost = "a row for each node" if is_product else "a row for each edge"
    assert [form, exact, cost] == SAID[name]


def test_the_table_has_the_layers_that_most_people_use() -> None:
    assert {"SAGEConv", "GCNConv", "GATConv", "GATv2Conv", "GINConv", "TransformerConv", *OTHERS} <= SAID.keys()
