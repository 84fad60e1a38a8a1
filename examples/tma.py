"""Classify nodes with ranks that meet by the clock, on parts that look alike (SuperTMA).

python examples/tma.py                                                        # two processes
lightning-gnn-dist elastic --ranks 3 -- python examples/tma.py --elastic      # three, any of which may die
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    EverySeconds,
    NeighborSampler,
    PartitionedDataModule,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
)


class SAGE(pl.LightningModule):
    """An ordinary module."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, 64), SAGEConv(64, num_classes)])
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch):
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x if conv is self.convs[-1] else x.relu()
        return x

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch):
        self.accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--elastic", action="store_true", help="every rank is a process of its own")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),
        partitioner=SuperNodePartitioner(1000),
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if options.elastic else 2,
        strategy=TMAStrategy(EverySeconds(1), elastic=options.elastic),
        max_epochs=options.rounds,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True, enable_version_counter=False)],
        logger=False,
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
