"""Predict who writes which paper, in a graph with types, with two processes, each on its own part of it.

python examples/typed_links.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import GrappaStrategy, LinkDataModule, LinkRanking, NeighborSampler, citations, split_edges

WRITES = ("author", "writes", "paper")


class TypedLayer(nn.Module):
    """One SAGE layer for each edge type; a node adds up what it gets from all of them (R-GCN)."""

    def __init__(self, edge_types, channels):
        super().__init__()
        self.convs = nn.ModuleDict({"__".join(kind): SAGEConv(channels, channels) for kind in edge_types})

    def forward(self, x, blocks):
        rows = {}
        for kind, block in blocks.items():
            source, _, target = kind
            if "__".join(kind) in self.convs and source in x:
                ends = x[source], x[target][: block.num_dst]
                rows.setdefault(target, []).append(self.convs["__".join(kind)](ends, block.adj))
        return {target: sum(found) for target, found in rows.items()}


class Recommender(pl.LightningModule):
    """Two typed layers; the score of a link is the product of what they make of its ends."""

    def __init__(self, widths, edge_types):
        super().__init__()
        # A type without features has one vector for all of its nodes.
        self.encoders = nn.ModuleDict({kind: nn.Linear(width or 1, 64) for kind, width in widths.items()})
        to_ends = [kind for kind in edge_types if kind[2] in WRITES]  # nobody reads what else the last layer makes
        self.layers = nn.ModuleList([TypedLayer(edge_types, 64), TypedLayer(to_ends, 64)])
        self.ranking = LinkRanking(hits=[1, 10])

    def forward(self, batch):
        x = {}
        for kind, encoder in self.encoders.items():
            store = batch[kind]
            x[kind] = encoder(store.x if "x" in store else torch.ones(store.num_nodes, 1, device=self.device)).relu()
        first, last = batch.blocks
        x = self.layers[1]({kind: rows.relu() for kind, rows in self.layers[0](x, first).items()}, last)
        author, paper = batch[WRITES].edge_label_index  # among the first rows of each type
        return (x["author"][author] * x["paper"][paper]).sum(1)

    def training_step(self, batch):
        return functional.binary_cross_entropy_with_logits(self(batch), batch[WRITES].edge_label)

    def validation_step(self, batch):
        label = batch[WRITES].edge_label
        self.ranking.update(self(batch), label)
        self.log_dict(self.ranking, prog_bar=True, batch_size=int(label.sum()))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


if __name__ == "__main__":
    pl.seed_everything(0)
    graph = citations(4_000, num_fields=40, noise=1.0)  # or Graph.from_pyg(hetero_data), or Graph.open(path)
    split = split_edges(graph, val=0.02, test=0.05, negatives=50, edge_type=WRITES)  # "rev_writes" goes with them
    data = LinkDataModule(split, sampler=NeighborSampler([5, 5]), batch_size=256)
    widths = {kind: arrays["x"].shape[1] if "x" in arrays else 0 for kind, arrays in graph.types.node_arrays.items()}
    model = Recommender(widths, graph.types.edge_types)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(), max_epochs=8, logger=False)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: every test link once, among the papers it was drawn with
