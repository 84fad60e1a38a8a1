"""A model with more layers than the sampler has hops is told so before it is judged."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GraphSAGE, SAGEConv, Sequential

from lightning_gnn_dist import Loading, NeighborSampler, PartitionedDataModule, communities
from lightning_gnn_dist.layers.evaluating.sight import check_depth

SAMPLER = NeighborSampler([3, 3])
CHAINS: list[nn.Module] = [
    nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 8), SAGEConv(8, 4)]),
    nn.ModuleList([GATConv(8, 4, heads=2), GATConv(8, 4, heads=2), GATConv(8, 3)]),
    Sequential("x, edge_index", [(SAGEConv(8, 8), "x, edge_index -> x")] * 3),
]
NO_CHAINS: list[nn.Module] = [
    nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 4)]),
    nn.ModuleList([GCNConv(8, 4), GCNConv(8, 4), GCNConv(8, 4)]),  # side by side
    nn.ModuleList([nn.Linear(8, 8)] * 5),
    GraphSAGE(8, 8, num_layers=2),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_list_that_may_be_a_chain_brings_a_warning(chain: nn.Module) -> None:
    with pytest.warns(UserWarning, match=r"convs has 3 message-passing layers, .* draws 2 hops"):
        check_depth(nn.ModuleDict({"convs": chain}), 2, SAMPLER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_depth(chain, 3, SAMPLER)


@pytest.mark.parametrize("module", NO_CHAINS, ids=str)
def test_what_may_be_right_is_left_alone(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_depth(module, 2, SAMPLER)


class Deep(pl.LightningModule):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.net = GraphSAGE(8, 8, num_layers, 4)

    def test_step(self, batch: Any) -> None:
        outputs = self.net(batch.x, batch.edge_index)[: batch.batch_size]
        error = nn.functional.cross_entropy(outputs, batch.y[: batch.batch_size])
        self.log("error", error, batch_size=batch.batch_size)


def judged(num_layers: int) -> tuple[float, float]:
    """By batches, and by the whole graph at once."""
    graph = communities(200, 4, num_features=8, seed=1)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **options)
    module, data = (
        Deep(num_layers),
        PartitionedDataModule(graph, sampler=SAMPLER, batch_size=5, loading=Loading(num_threads=0)),
    )
    ((figures),) = trainer.test(module, data, verbose=False)
    receivers = torch.repeat_interleave(torch.arange(200), graph.indptr.diff())
    edges = torch.stack([graph.indices.long(), receivers])
    with torch.no_grad():
        outputs = module.net(graph.node_arrays["x"], edges)[graph.split("test")]
    return figures["error"], float(nn.functional.cross_entropy(outputs, graph.node_arrays["y"][graph.split("test")]))


def test_as_many_layers_as_hops_are_judged_exactly_and_more_are_refused() -> None:
    of_batches, of_graph = judged(2)
    assert of_batches == pytest.approx(of_graph, rel=1e-5)
    with pytest.raises(ValueError, match=r"net \(GraphSAGE\) has num_layers=3, and NeighborSampler.* draws 2 hops"):
        judged(3)
