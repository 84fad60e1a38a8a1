"""A model of a typed graph with a method ``layers``, and what it computes by hand, without a line of this package."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphConv, HeteroConv

from lightning_gnn_dist import coverage_mean, through_layers
from tests.typed_sage import WIDTHS, EdgeType, typed_graph_of_papers

HIDDEN, CLASSES = 5, 2


def some_data(num_papers: int = 200) -> HeteroData:
    """Papers, authors, words and venues, in float64."""
    data = typed_graph_of_papers(num_papers).to_pyg()
    for kind in data.node_types:
        data[kind].x = data[kind].x.double()
    return data


class ByLayers(pl.LightningModule):
    """Two or three layers. A node of a type to which no edge leads keeps what a matrix makes of it."""

    def __init__(self, edge_types: Sequence[EdgeType], num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.called: list[dict[str, int]] = []
        self.convs = torch.nn.ModuleList()
        self.own = torch.nn.ModuleList()
        for index in range(num_layers):
            widths = WIDTHS if index == 0 else dict.fromkeys(WIDTHS, HIDDEN)
            out = CLASSES if index == num_layers - 1 else HIDDEN
            convs = {kind: GraphConv((widths[kind[0]], widths[kind[2]]), out) for kind in edge_types}
            self.convs.append(HeteroConv(convs, aggr="sum"))
            self.own.append(torch.nn.ModuleDict({kind: torch.nn.Linear(widths[kind], out) for kind in WIDTHS}))
        self.double()

    def rows(self, index: int, x: dict[str, Tensor], edges: Any) -> dict[str, Tensor]:
        found = self.convs[index](x, edges)
        of_all = {kind: found.get(kind, 0.0) + self.own[index][kind](rows) for kind, rows in x.items()}
        return of_all if index == len(self.convs) - 1 else {kind: rows.tanh() for kind, rows in of_all.items()}

    def layers(self) -> list[Callable[[Any], dict[str, Tensor]]]:
        def layer(batch: Any, index: int) -> dict[str, Tensor]:
            self.called.append({kind: batch[kind].batch_size for kind in batch.node_types})
            return self.rows(index, batch.x_dict, batch.edge_index_dict)

        return [lambda batch, index=index: layer(batch, index) for index in range(len(self.convs))]

    def forward(self, batch: Any) -> Any:
        return through_layers(self, batch)

    def whole(self, data: HeteroData) -> dict[str, Tensor]:
        """All rows of a graph, by hand."""
        x = data.x_dict
        for index in range(len(self.convs)):
            x = self.rows(index, x, data.edge_index_dict)
        return x

    def training_step(self, batch: Any, _: int) -> Tensor:
        y = batch["paper"].y[: batch.num_targets]
        return coverage_mean(F.cross_entropy(self(batch), y, reduction="none"), batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch), batch["paper"].y[: batch.num_targets], reduction="sum")
        self.log("test_loss", loss, batch_size=batch.num_targets, on_epoch=True, sync_dist=True, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def predict_step(self, batch: Any, _: int) -> Tensor:
        rows: Tensor = self(batch)
        return rows

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class OfLinks(ByLayers):
    """Scores of links: products of rows."""

    asked = ("author", "writes", "paper")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        rows, (sender, receiver) = self(batch), batch[self.asked].edge_label_index
        scores = (rows["author"][sender] * rows["paper"][receiver]).sum(1)
        loss = F.binary_cross_entropy_with_logits(scores, batch[self.asked].edge_label, reduction="sum")
        self.log("test_loss", loss, batch_size=len(scores), on_epoch=True, sync_dist=True, reduce_fx="sum")
