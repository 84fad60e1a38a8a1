"""A two-layer GraphSAGE for tests, on blocks or on edge_index."""

import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy


class SAGE(pl.LightningModule):
    """Remembers the seeds it was shown and what it predicted for them, by global id."""

    def __init__(
        self, num_features: int, num_classes: int, *, blocks: bool = True, dropout: float = 0.0, lr: float = 0.01
    ) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, 16), SAGEConv(16, num_classes)])
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.blocks, self.dropout, self.lr = blocks, dropout, lr
        self.trained: list[Tensor] = []
        self.evaluated: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, conv in enumerate(self.convs):
            if self.blocks:
                block = batch.blocks[layer]
                x = conv((x, x[: block.num_dst]), block.adj)
            else:
                x = conv(x, batch.edge_index)
            if layer == 0:
                x = functional.dropout(x.relu(), self.dropout, self.training)
        return x[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        self.trained.append(batch.n_id[: batch.batch_size].clone())
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        logits, y = self(batch), batch.y[: batch.batch_size]
        self.evaluated.append((batch.n_id[: batch.batch_size].clone(), logits.detach().clone()))
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)
        self.log("loss", functional.cross_entropy(logits, y), sync_dist=True, batch_size=batch.batch_size)

    test_step = validation_step

    def predict_step(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.n_id[: batch.batch_size].clone(), self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Ending(SAGE):
    """Ends as it is told, when it has taken so many steps: by a signal, on rank 1 if it is SIGKILL."""

    def __init__(self, num_features: int, num_classes: int, how: str = "", at: int = 2) -> None:
        super().__init__(num_features, num_classes)
        self.how, self.at = how, at

    def training_step(self, batch: Any) -> Tensor:
        if self.global_step == self.at:
            if self.how == "exception":
                raise ZeroDivisionError
            if self.how == "SIGTERM" or (self.how == "SIGKILL" and self.global_rank == 1):
                os.kill(os.getpid(), signal.Signals[self.how])
        return super().training_step(batch)
