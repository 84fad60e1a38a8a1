"""Features that a model cannot take are named, where torch would speak of two matrices."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv, SAGEConv

from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.data.explained_errors import explain_features
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

GRAPH = communities(60, 2, num_features=8)
X = GRAPH.node_arrays["x"]


class OneLayer(pl.LightningModule):
    """A layer on what a batch has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def training_step(self, batch: Any) -> Tensor:
        logits = self.layer(batch.x, batch.edge_index)[: batch.batch_size]
        return functional.cross_entropy(logits, batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> Tensor:
        return self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(x: Tensor, layer: nn.Module) -> None:
    graph = Graph(GRAPH.indptr, GRAPH.indices, {**GRAPH.node_arrays, "x": x})
    data = PartitionedDataModule(graph, sampler=NeighborSampler([3]), batch_size=64, loading=Loading(num_threads=0))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1, enable_model_summary=False, **quiet)
    trainer.fit(OneLayer(layer), data)


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X.double(), r"x holds torch\.float64, and the model computes with another type: data\.x = data\.x\.float\(\)"),
        (X.long(), r"x holds torch\.int64, and the model"),
        (X > 0, r"x holds torch\.bool, and the model"),
        (X[:, 0].contiguous(), r"x has the shape \(60,\), .* data\.x = data\.x\.view\(-1, 1\)"),
        (X.view(60, 2, 4), r"x has the shape \(60, 2, 4\), .* data\.x = data\.x\.flatten\(1\)"),
        (X[:, :5].contiguous(), "x has 5 features, and a layer of the model takes 8: build it with 5"),
    ],
)
@pytest.mark.parametrize("kind", [SAGEConv, GCNConv])
def test_features_that_a_layer_cannot_take_are_named(kind: type[nn.Module], x: Tensor, reason: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=reason):
        fit(x, kind(8, 2))


def test_what_has_nothing_to_do_with_features_keeps_its_words() -> None:
    for error in (ValueError("mine"), RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 8x2)")):
        explain_features(error, X)
        explain_features(error, X[:, 0])
        explain_features(error, None)
        assert "x h" not in str(error)
