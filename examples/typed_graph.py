"""Classify papers of a graph with types, with two processes, each on its own part of it.

python examples/typed_graph.py
python examples/typed_graph.py --shards my_shares       # the same on shards: as if no host could hold the graph
"""

from argparse import ArgumentParser
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    GrappaStrategy,
    Halo,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    citations,
    save_shards,
    through_layers,
)

NUM_RANKS = 2


class TypedLayer(nn.Module):
    """One SAGE layer for each edge type; a node adds up what it gets from all of them (R-GCN)."""

    def __init__(self, edge_types, channels_in, channels_out):
        super().__init__()
        self.convs = nn.ModuleDict({"__".join(kind): SAGEConv(channels_in, channels_out) for kind in edge_types})

    def forward(self, x, blocks):
        rows = {}
        for kind, block in blocks.items():
            source, _, target = kind
            if "__".join(kind) in self.convs and source in x:
                ends = x[source], x[target][: block.num_dst]
                rows.setdefault(target, []).append(self.convs["__".join(kind)](ends, block.adj))
        return {target: sum(found) for target, found in rows.items()}


class RGCN(pl.LightningModule):
    """Two typed layers, on 64 numbers that each type's features are first brought to."""

    def __init__(self, widths, edge_types, num_classes):
        super().__init__()
        # A type without features has one vector for all of its nodes.
        self.encoders = nn.ModuleDict({kind: nn.Linear(width or 1, 64) for kind, width in widths.items()})
        of_papers = [kind for kind in edge_types if kind[2] == "paper"]  # nobody reads what else the last layer makes
        self.inner, self.last = TypedLayer(edge_types, 64, 64), TypedLayer(of_papers, 64, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def layers(self):  # said one by one, so that an evaluation computes each once for all nodes
        return [self.first_rows, lambda batch: self.last(batch.x_dict, batch.blocks[0])]

    def forward(self, batch):
        return through_layers(self, batch)  # a row for each seed

    def first_rows(self, batch):
        x = {}
        for kind, encoder in self.encoders.items():
            store = batch[kind]
            x[kind] = encoder(store.x if "x" in store else torch.ones(store.num_nodes, 1, device=self.device)).relu()
        # Or, as in PyG, layers on batch.edge_index_dict: the same rows, more slowly.
        found = self.inner(x, batch.blocks[0])
        return {kind: functional.dropout(rows.relu(), 0.3, self.training) for kind, rows in found.items()}

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch["paper"].y[: batch.batch_size])

    def validation_step(self, batch):
        self.accuracy(self(batch), batch["paper"].y[: batch.batch_size])
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data_of(graph, shards):
    options = {"boundary": Halo(), "sampler": NeighborSampler([5, 5]), "batch_size": 256}
    if shards is None:
        return PartitionedDataModule(graph, partitioner=MetisPartitioner(), **options)
    if not shards.exists():
        save_shards(graph, MetisPartitioner()(graph, NUM_RANKS, seed=0), shards)
    return PartitionedDataModule(shards, **options)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--shards", type=Path, help="the folder of the shards; made where there is none")
    graph = citations(4_000, noise=4.0)  # or Graph.from_pyg(hetero_data), or the path of a saved graph
    data = data_of(graph, parser.parse_args().shards)
    widths = {kind: arrays["x"].shape[1] if "x" in arrays else 0 for kind, arrays in graph.types.node_arrays.items()}
    model = RGCN(widths, graph.types.edge_types, num_classes=6)
    trainer = pl.Trainer(accelerator="cpu", devices=NUM_RANKS, strategy=GrappaStrategy(), max_epochs=8, logger=False)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: the whole graph, every test paper once
