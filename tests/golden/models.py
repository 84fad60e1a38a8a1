"""Modules that are trained: of nodes and of links, with types and without, by blocks and by layers."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GraphSAGE, HeteroConv, SAGEConv
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import LazyAdam, LinkRanking, OwnedEmbedding, coverage_mean, layers_of, through_layers
from tests.golden.device import chosen
from tests.golden.graphs import CLASSES, COUNTS, NODES, WIDTH, WIDTHS

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "lazy_adam": lambda parameters: LazyAdam(parameters, lr=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Judged(pl.LightningModule):
    """Learns classes of seeds; a subclass says what rows it computes."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.accuracy, self.optimizer = MulticlassAccuracy(CLASSES, average="micro"), optimizer

    def labels(self, batch: Any) -> Tensor:
        return batch.y[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        return coverage_mean(functional.cross_entropy(self(batch), self.labels(batch), reduction="none"), batch)

    def validation_step(self, batch: Any) -> None:
        rows, labels = self(batch), self.labels(batch)
        self.accuracy.update(rows, labels)
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)
        self.log("loss", functional.cross_entropy(rows, labels), batch_size=batch.batch_size, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.n_id[: batch.batch_size].clone(), self(batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Blocks(Judged):
    """What strategies have to care for: a norm, dropout, weights of edges and of seeds."""

    def __init__(self, num_layers: int = 2, **options: Any) -> None:
        super().__init__(**options)
        widths = [WIDTH, *[12] * (num_layers - 1), CLASSES]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))
        self.norm, self.dropout = nn.BatchNorm1d(12), float(chosen("dropout"))

    def rows(self, batch: Any) -> Tensor:
        return batch.x

    def forward(self, batch: Any) -> Tensor:
        x = self.rows(batch)
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj if block.weight is None else block.weighted_adj)
            x = x if conv is self.convs[-1] else functional.dropout(self.norm(x).relu(), self.dropout, self.training)
        return x[: batch.batch_size]


class Edges(Judged):
    """A module as PyG's loaders want it: it reads ``edge_index``."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = GraphSAGE(WIDTH, 12, 2, CLASSES)

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]


class Layered(Judged):
    """Defined by its layers, so that boundaries and evaluations may take them apart."""

    def __init__(self, *, ready_made: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.gnn = GraphSAGE(WIDTH, 12, 2, CLASSES) if ready_made else None
        self.convs = nn.ModuleList([] if ready_made else [SAGEConv(WIDTH, 12), SAGEConv(12, CLASSES)])

    def layers(self) -> Any:
        if self.gnn is not None:
            return layers_of(self.gnn)
        return [lambda batch, conv=conv: self._layer(conv, batch) for conv in self.convs]

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        x: Tensor = conv(batch.x, batch.edge_index)
        return x if conv is self.convs[-1] else x.tanh()

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)


def table(count: int, width: int, *, owned: bool) -> nn.Module:
    return OwnedEmbedding(count, width, seed=4) if owned else nn.Embedding(count, width, sparse=True)


class Rows(Blocks):
    """Learns a row for each node beside its features."""

    def __init__(self, *, owned: bool, optimizer: str = "lazy_adam") -> None:
        super().__init__(optimizer=optimizer)
        self.table = table(NODES, WIDTH, owned=owned)

    def rows(self, batch: Any) -> Tensor:
        return batch.x + self.table(batch.n_id)


class Typed(Judged):
    """Two layers for each edge type; with ``rows`` a learned one for each author."""

    def __init__(self, edge_types: Any, *, owned: bool | None = None, **options: Any) -> None:
        super().__init__(**({} if owned is None else {"optimizer": "lazy_adam"}) | options)
        self.convs = nn.ModuleList([of_types(edge_types, WIDTHS, 8), of_types(edge_types, dict.fromkeys(COUNTS, 8), 8)])
        self.head = nn.Linear(8, CLASSES)
        self.table = None if owned is None else table(COUNTS["author"], WIDTHS["author"], owned=owned)

    def labels(self, batch: Any) -> Tensor:
        return batch["paper"].y[: batch.batch_size]

    def embeddings(self, batch: Any) -> Mapping[str, Tensor]:
        x = dict(batch.x_dict)
        if self.table is not None:
            x["author"] = x["author"] + self.table(batch["author"].n_id)
        hidden = {kind: rows.tanh() for kind, rows in self.convs[0](x, batch.edge_index_dict).items()}
        return self.convs[1](hidden, batch.edge_index_dict)

    def forward(self, batch: Any) -> Tensor:
        return self.head(self.embeddings(batch)["paper"][: batch.batch_size])


def of_types(edge_types: Any, widths: Mapping[str, int], out: int) -> HeteroConv:
    convs = {kind: SAGEConv((widths[kind[0]], widths[kind[2]]), out) for kind in edge_types}
    return HeteroConv(convs, aggr="sum")


class Links(pl.LightningModule):
    """Scores links, or learns their labels, by two layers and the ends' product; of typed graphs if there are types."""

    def __init__(self, asked: Any = None, edge_types: Any = (), *, labels: bool = False) -> None:
        super().__init__()
        self.asked, self.labelled = asked, labels
        self.encoder: Any = nn.ModuleList([SAGEConv(WIDTH, 8), SAGEConv(8, 8)]) if asked is None else Typed(edge_types)
        self.ranking, self.error = LinkRanking(hits=[1, 3]), MeanSquaredError()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        if self.asked is None:
            x = self.encoder[1](self.encoder[0](batch.x, batch.edge_index).tanh(), batch.edge_index)
            (sender, receiver), labels = batch.edge_label_index, batch.edge_label
            return (x[sender] * x[receiver]).sum(1), labels
        rows, store = self.encoder.embeddings(batch), batch[self.asked]
        sender, receiver = store.edge_label_index
        return (rows[self.asked[0]][sender] * rows[self.asked[2]][receiver]).sum(1), store.edge_label

    def training_step(self, batch: Any) -> Tensor:
        scores, labels = self(batch)
        if self.labelled:
            return functional.mse_loss(scores, labels.float())
        return functional.binary_cross_entropy_with_logits(scores, labels)

    def validation_step(self, batch: Any) -> None:
        scores, labels = self(batch)
        if self.labelled:
            self.error.update(scores, labels)
            self.log("error", self.error, batch_size=len(labels))
        else:
            self.ranking.update(scores, labels)
            self.log_dict(dict(self.ranking), batch_size=int(labels.sum()))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
