"""A model that predicts links of one edge type, in plain PyG and Lightning."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HeteroConv, SAGEConv

from lightning_gnn_dist import LinkRanking
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.typed_sage import WIDTHS


class LinkHetero(pl.LightningModule):
    """Two layers for each edge type, and the product of two rows for a link. Records the targets it is asked for."""

    def __init__(self, edge_types: list[EdgeType], asked: EdgeType, lr: float = 0.05) -> None:
        super().__init__()
        self.asked, self.lr = asked, lr
        first = {kind: SAGEConv((WIDTHS[kind[0]], WIDTHS[kind[2]]), 8) for kind in edge_types}
        last = {kind: SAGEConv((8, 8), 8) for kind in edge_types}
        self.convs = torch.nn.ModuleList(HeteroConv(of_layer, aggr="mean") for of_layer in (first, last))
        self.ranking = LinkRanking(hits=[1, 3])
        self.targets: list[tuple[int, int, float]] = []

    def rows(self, batch: Any) -> dict[str, Tensor]:
        hidden = {kind: rows.relu() for kind, rows in self.convs[0](batch.x_dict, batch.edge_index_dict).items()}
        found: dict[str, Tensor] = self.convs[1](hidden, batch.edge_index_dict)
        return found

    def forward(self, batch: Any) -> Tensor:
        rows, (sender, receiver) = self.rows(batch), batch[self.asked].edge_label_index
        self.targets += targets_of(batch, self.asked)
        return (rows[self.asked[0]][sender] * rows[self.asked[2]][receiver]).sum(1)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch), batch[self.asked].edge_label)

    def validation_step(self, batch: Any, _: int) -> None:
        label = batch[self.asked].edge_label
        self.ranking.update(self(batch), label)
        self.log_dict(dict(self.ranking), batch_size=int(label.sum()))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def targets_of(batch: Any, kind: EdgeType) -> list[tuple[int, int, float]]:
    """Sender, receiver and label of each target, by ids in the types of the whole graph."""
    sender, receiver = batch[kind].edge_label_index
    ids = batch[kind[0]].n_id[sender].tolist(), batch[kind[2]].n_id[receiver].tolist()
    return list(zip(*ids, batch[kind].edge_label.tolist(), strict=True))
