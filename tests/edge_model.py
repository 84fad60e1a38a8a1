"""Graphs whose edges have labels, and a model that learns them as a user writes it."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SAGEConv
from torchmetrics import MeanSquaredError

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType

RATES: EdgeType = ("user", "rates", "film")
BACK: EdgeType = ("film", "rev_rates", "user")
KNOWS: EdgeType = ("user", "knows", "user")
NODES, USERS, FILMS = 90, 40, 50


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rated() -> Graph:
    """Directed, with copies of edges and loops. One in five has no label; each has a number of its own."""
    generator = draw()
    edges = torch.randint(NODES, (2, 700), generator=generator)
    edges = torch.cat([edges, edges[:, :40], torch.arange(6).expand(2, 6)], 1)
    return Graph.from_pyg(
        Data(
            x=torch.randn(NODES, 4, generator=generator, dtype=torch.float64),
            edge_index=edges,
            edge_rating=ratings(edges.shape[1], generator),
            edge_mark=torch.arange(edges.shape[1]),
        ),
        check_features=False,  # NaN stands for no label
    )


def typed_ratings() -> Graph:
    """Users rate films, some more than once, and know each other. The reverse type carries the same arrays."""
    generator, data = draw(1), HeteroData()
    rates = torch.stack([torch.randint(n, (400,), generator=generator) for n in (USERS, FILMS)])
    rates = torch.cat([rates, rates[:, :30]], 1)
    label, mark = ratings(430, generator), torch.arange(430)
    for kind, count in (("user", USERS), ("film", FILMS)):
        data[kind].x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    for edge_type, edges in ((RATES, rates), (BACK, rates.flip(0))):
        data[edge_type].edge_index = edges
        data[edge_type].rating, data[edge_type].mark = label, mark
    data[KNOWS].edge_index = torch.randint(USERS, (2, 150), generator=generator)
    data[KNOWS].mark = torch.arange(150)
    return Graph.from_pyg(data, check_features=False)


def ratings(count: int, generator: torch.Generator) -> Tensor:
    label = torch.randint(1, 6, (count,), generator=generator).to(torch.float64)
    label[torch.rand(count, generator=generator) < 0.2] = float("nan")
    return label


class Rater(pl.LightningModule):
    """Two layers of mean SAGE over the batch's edges, whatever their types, and a linear decoder of both ends.

    Records what it is asked for: marks and labels of edges.
    """

    def __init__(self, *, lr: float = 0.1, edge_type: EdgeType | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convs = nn.ModuleList([SAGEConv(4, 6), SAGEConv(6, 6)]).double()
        self.decoder = nn.Linear(12, 1).double()
        self.error, self.lr, self.edge_type = MeanSquaredError(), lr, edge_type
        self.asked: Counter[tuple[int, float]] = Counter()

    def targets(self, batch: Any) -> Any:
        return batch if self.edge_type is None else batch[self.edge_type]

    def forward(self, batch: Any) -> Tensor:
        targets = self.targets(batch)
        self.asked.update(zip(targets.edge_label_mark.tolist(), targets.edge_label.tolist(), strict=True))
        if self.edge_type is None:
            return self.scores(batch.x, batch.edge_index, batch.edge_label_index)
        counts = {kind: batch[kind].num_nodes for kind in ("user", "film")}
        return self.scores(*flat(batch, counts), self.flat_targets(targets.edge_label_index, counts))

    def flat_targets(self, ends: Tensor, counts: dict[str, int]) -> Tensor:
        return ends + torch.tensor([[0], [counts["user"]]])

    def scores(self, x: Tensor, edge_index: Tensor, ends: Tensor) -> Tensor:
        rows = self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)
        found: Tensor = self.decoder(torch.cat([rows[ends[0]], rows[ends[1]]], 1)).squeeze(1)
        return found

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch), self.targets(batch).edge_label)

    def validation_step(self, batch: Any) -> None:
        label = self.targets(batch).edge_label
        self.error.update(self(batch), label)
        self.log("error", self.error, batch_size=len(label))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def flat(batch: Any, counts: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Features and edges of users and films as one graph: users first."""
    first = {"user": 0, "film": counts["user"]}
    edges = [store.edge_index + torch.tensor([[first[k[0]]], [first[k[2]]]]) for k, store in batch.edge_items()]
    return torch.cat([batch["user"].x, batch["film"].x]), torch.cat(edges, 1)
