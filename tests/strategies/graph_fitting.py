"""A small fit on parts of a graph, to hold laws of LLCG and of drift correction against."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics.aggregation import MeanMetric

from lightning_gnn_dist import Evaluation, Graph, NeighborSampler, PartitionedDataModule, communities
from tests.data_fitting import trainer
from tests.sage import SAGE


def small_graph() -> Graph:
    return communities(400, 4, num_features=12, train_share=0.2, noise=2.0, seed=3)


def data_module(**options: Any) -> PartitionedDataModule:
    defaults: dict[str, Any] = {
        "sampler": NeighborSampler([4, 4]),
        "batch_size": 8,
        "evaluation": Evaluation(batch_size=100),
    }
    return PartitionedDataModule(small_graph(), **(defaults | options))


class Batched(SAGE):
    """With a statistic that batches move."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = torch.nn.BatchNorm1d(12)
        self.losses = MeanMetric()
        self.steps_logged = 0

    def forward(self, batch: Any) -> Tensor:
        batch.x = self.norm(batch.x)
        return super().forward(batch)

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.losses(loss.detach())
        self.log("train_loss", self.losses, on_epoch=True, batch_size=batch.batch_size)
        return loss


class Remembering(SAGE):
    """Writes into a buffer, and puts another in its place, at every step; and its loss depends on them."""

    mean_loss: Tensor
    steps: Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("mean_loss", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        self.mean_loss.mul_(0.9).add_(0.1 * loss.detach())
        self.steps = self.steps + 1
        return loss + 0.1 * self.mean_loss.sum() * sum(parameter.square().sum() for parameter in self.parameters())


def model(kind: type[SAGE] = SAGE, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(12, 4, **options)


def fit(
    strategy: Any, module: Any, data: Any, world_size: int, ckpt_path: str | None = None, **options: Any
) -> pl.Trainer:
    fitted = trainer(world_size, strategy, **({"max_epochs": 3} | options))
    fitted.fit(module, data, ckpt_path=ckpt_path)
    return fitted
