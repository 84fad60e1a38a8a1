"""Classify papers by attention over each type of edges (R-GAT), with two processes, each on its own part of the graph.

python examples/rgat.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import GATConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import EverySteps, Halo, LLCGStrategy, NeighborSampler, PartitionedDataModule, citations

HIDDEN, HEADS = 64, 4


class Attention(nn.Module):
    """For each edge type, attention of its own; a node adds up what it gets from all types to what it knows itself."""

    def __init__(self, edge_types):
        super().__init__()
        options = {"heads": HEADS, "add_self_loops": False}
        self.convs = nn.ModuleDict(
            {"__".join(kind): GATConv((HIDDEN, HIDDEN), HIDDEN // HEADS, **options) for kind in edge_types}
        )
        targets = sorted({target for _, _, target in edge_types})
        self.own = nn.ModuleDict({target: nn.Linear(HIDDEN, HIDDEN) for target in targets})
        self.norms = nn.ModuleDict({target: nn.LayerNorm(HIDDEN) for target in targets})

    def forward(self, x, blocks):
        # The first num_dst nodes of a type receive: they get rows, and the next layer needs no others.
        sizes = {target: block.num_dst for (_, _, target), block in blocks.items()}
        rows = {target: own(x[target][: sizes[target]]) for target, own in self.own.items()}
        for kind, block in blocks.items():
            source, _, target = kind
            if target in rows:
                ends = x[source], x[target][: block.num_dst]
                rows[target] = rows[target] + self.convs["__".join(kind)](ends, block.adj)
        return {target: functional.leaky_relu(self.norms[target](found)) for target, found in rows.items()}


class RGAT(pl.LightningModule):
    """Two layers of attention between a linear layer for each type's features and one for the classes."""

    def __init__(self, widths, edge_types, num_classes):
        super().__init__()
        # A type without features has one vector for all of its nodes.
        self.encoders = nn.ModuleDict({kind: nn.Linear(width or 1, HIDDEN) for kind, width in widths.items()})
        of_papers = [kind for kind in edge_types if kind[2] == "paper"]  # nobody reads what else the last layer makes
        self.layers = nn.ModuleList([Attention(edge_types), Attention(of_papers)])
        self.head = nn.Linear(HIDDEN, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch):
        x = {}
        for kind, encoder in self.encoders.items():
            store = batch[kind]
            x[kind] = encoder(store.x if "x" in store else torch.ones(store.num_nodes, 1, device=self.device))
        for layer, blocks in zip(self.layers, batch.blocks, strict=True):
            x = {kind: functional.dropout(rows, 0.3, self.training) for kind, rows in layer(x, blocks).items()}
        return self.head(x["paper"])  # a row for each seed

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch["paper"].y[: batch.batch_size])

    def validation_step(self, batch):
        self.accuracy(self(batch), batch["paper"].y[: batch.batch_size])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


if __name__ == "__main__":
    graph = citations(4_000, noise=4.0)  # or Graph.from_pyg(hetero_data), or the path of a saved graph
    data = PartitionedDataModule(graph, boundary=Halo(), sampler=NeighborSampler([5, 5]), batch_size=128)
    widths = {kind: arrays["x"].shape[1] if "x" in arrays else 0 for kind, arrays in graph.types.node_arrays.items()}
    model = RGAT(widths, graph.types.edge_types, num_classes=6)
    # Local steps, and at each meeting one step along the gradient of the whole graph.
    strategy = LLCGStrategy(EverySteps(8))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=4, logger=False)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: the whole graph, every test paper once
