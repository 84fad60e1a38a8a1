"""A model of typed graphs as a user writes it, and a small graph that it can learn."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroConv, SAGEConv

from lightning_gnn_dist import Graph, citations, coverage_mean
from lightning_gnn_dist.graph.typed.types import EdgeType

WIDTHS = {"paper": 32, "author": 16, "word": 8, "venue": 4}


def typed_graph_of_papers(num_papers: int = 400) -> Graph:
    """Papers to classify into two fields; venues have an id of their own as a feature."""
    data = citations(num_papers, 2, noise=2.0, seed=1).to_pyg()
    data["venue"].x = torch.randn(num_papers // 100, 4, generator=torch.Generator().manual_seed(0))
    return Graph.from_pyg(data, time="time")


class HeteroSAGE(pl.LightningModule):
    """Two layers of SAGE for each edge type."""

    def __init__(self, edge_types: list[EdgeType], lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.convs = torch.nn.ModuleList(
            HeteroConv(
                {
                    kind: SAGEConv((WIDTHS[kind[0]], WIDTHS[kind[2]]) if first else (8, 8), 8 if first else 2)
                    for kind in edge_types
                },
                aggr="mean",
            )
            for first in (True, False)
        )

    def rows(self, batch: Any) -> dict[str, Tensor]:
        first, last = self.convs
        hidden = {kind: rows.relu() for kind, rows in first(batch.x_dict, batch.edge_index_dict).items()}
        found: dict[str, Tensor] = last(hidden, batch.edge_index_dict)
        return found

    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch)["paper"]

    def training_step(self, batch: Any, _: int) -> Tensor:
        size = batch.batch_size
        return coverage_mean(F.cross_entropy(self(batch)[:size], batch["paper"].y[:size], reduction="none"), batch)

    def validation_step(self, batch: Any, _: int) -> None:
        self._judge("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._judge("test", batch)

    def _judge(self, name: str, batch: Any) -> None:
        size = batch.batch_size
        is_right = (self(batch)[:size].argmax(1) == batch["paper"].y[:size]).float().mean()
        self.log(f"{name}_acc", is_right, batch_size=size, on_epoch=True, sync_dist=True)

    def predict_step(self, batch: Any, _: int) -> Tensor:
        return self(batch)[: batch.batch_size]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)
