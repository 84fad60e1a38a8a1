"""Classify nodes with two processes, each on its own part of the graph.

python examples/node_classification.py
torchrun --nproc-per-node 2 examples/node_classification.py       # the same, started by torchrun
"""

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.nn import GraphSAGE
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    GrappaStrategy,
    Halo,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    communities,
    layers_of,
    through_layers,
)


class SAGE(pl.LightningModule):
    """One of PyG's models, layer by layer: ``self.gnn(batch.x, batch.edge_index)`` would do as well, but slower."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.gnn = GraphSAGE(num_features, 64, num_layers=2, out_channels=num_classes, dropout=0.5)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def layers(self):
        return layers_of(self.gnn)

    def forward(self, batch):
        return through_layers(self, batch)

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch):
        self.accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    graph = communities(num_nodes=20_000, num_classes=8)  # or Graph.from_pyg(data), or the path of a saved graph
    data = PartitionedDataModule(
        graph, partitioner=MetisPartitioner(), boundary=Halo(), sampler=NeighborSampler([10, 10]), batch_size=256
    )
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(), max_epochs=8, logger=False)
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: the whole graph, every test node once
