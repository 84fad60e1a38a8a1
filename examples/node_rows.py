"""Nodes without features: each has a row of numbers of its own, which is learned.

python examples/node_rows.py          # every rank holds all rows
python examples/node_rows.py --owned  # each holds a third of them, and asks the others for theirs
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    GrappaStrategy,
    LazyAdam,
    LLCGStrategy,
    NeighborSampler,
    OwnedEmbedding,
    PartitionedDataModule,
    communities,
)


class RowsSAGE(pl.LightningModule):
    """GraphSAGE on learned rows."""

    def __init__(self, num_nodes, num_classes, owned):
        super().__init__()
        if owned:
            self.rows = OwnedEmbedding(num_nodes, 64, std=0.1)
        else:
            self.rows = torch.nn.Embedding(num_nodes, 64, sparse=True)  # ranks exchange rows that were touched
        self.convs = torch.nn.ModuleList([SAGEConv(64, 64), SAGEConv(64, num_classes)])
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch):
        x = self.rows(batch.n_id)
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = functional.dropout(x.relu(), 0.5, self.training) if conv is self.convs[0] else x
        return x

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch):
        self.accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return LazyAdam(self.parameters(), lr=0.01)  # Adam for all else


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--owned", action="store_true", help="let rows live with one rank each")
    owned = parser.parse_args().owned

    pl.seed_everything(2)
    made = communities(num_nodes=10_000, num_classes=8)
    arrays = {name: array for name, array in made.node_arrays.items() if name != "x"}
    graph = Graph(made.indptr, made.indices, node_arrays=arrays)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256)
    strategy = GrappaStrategy() if owned else LLCGStrategy(EverySteps(16))
    trainer = pl.Trainer(accelerator="cpu", devices=3, strategy=strategy, max_epochs=15, logger=False)
    model = RowsSAGE(graph.num_nodes, num_classes=8, owned=owned)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: all neighbours, every test node once
