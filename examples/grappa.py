"""Gradients every step and nothing else: parts that rotate, and nodes weighed by what their part sees of them.

python examples/grappa.py
"""

import lightning.pytorch as pl
from node_classification import SAGE
from torch.nn import functional

from lightning_gnn_dist import (
    GrappaStrategy,
    Holding,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Rotate,
    communities,
    coverage_mean,
)


class WeighedSAGE(SAGE):
    """Returns the mean of its seeds' losses by coverage. With a plain mean, whole batches are weighed."""

    def training_step(self, batch):
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        return coverage_mean(losses, batch)


if __name__ == "__main__":
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),
        partitioner=RandomPartitioner(),
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
        holding=Holding(Rotate()),  # a base chunk for good, and one that changes: all edges are seen in turn
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=GrappaStrategy(),
        max_epochs=40,  # passes over the training nodes
        check_val_every_n_epoch=10,
        logger=False,
    )
    model = WeighedSAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
