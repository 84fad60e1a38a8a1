"""A small fit on parts with coverage, to hold laws of Grappa against."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.strategies.fitting import State, state_of


def grappa(**options: Any) -> lgd.GrappaStrategy:
    return lgd.GrappaStrategy(**PATIENCE, **options)


def graph() -> lgd.Graph:
    return lgd.communities(600, 4, num_features=8, train_share=0.3, seed=1)


class Model(pl.LightningModule):
    """Two layers, SGD; weighs nodes or leaves that to the strategy."""

    def __init__(self, *, weighs_nodes: bool = True, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)])
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.weighs_nodes, self.dropout = weighs_nodes, dropout
        self.seen: list[tuple[Tensor, bool]] = []
        self.validated: list[State] = []

    def forward(self, batch: Any) -> Tensor:
        x = self.norm(self.convs[0](batch.x, batch.edge_index)).relu()
        x = functional.dropout(x, self.dropout, self.training)
        return self.convs[1](x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append((batch.n_id[: batch.batch_size].clone(), batch.is_filler))
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        return lgd.coverage_mean(losses, batch) if self.weighs_nodes else losses.mean()

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self(batch).sum(), sync_dist=True, batch_size=batch.batch_size)

    def on_validation_start(self) -> None:
        self.validated.append(state_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_of(source: lgd.Graph | None = None, **options: Any) -> lgd.PartitionedDataModule:
    defaults: dict[str, Any] = {
        "partitioner": lgd.RandomPartitioner(),
        "sampler": lgd.WholePartSampler(2),
        "batch_size": 10**9,
        "loading": lgd.Loading(num_threads=0),
        "boundary": lgd.Isolated(),
    }
    return lgd.PartitionedDataModule(graph() if source is None else source, **(defaults | options))


def trainer_of(devices: int, strategy: Any, **options: Any) -> pl.Trainer:
    return trainer(devices, strategy, **({"limit_val_batches": 0} | options))
