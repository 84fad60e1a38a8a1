"""Predict links with two processes that meet by the clock, on parts that look alike (SuperTMA).

python examples/link_prediction.py
python examples/link_prediction.py --shards my_shares   # the same on shards: as if no host could hold the graph
"""

import argparse
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySeconds,
    LinkDataModule,
    LinkRanking,
    MetisPartitioner,
    NeighborSampler,
    TMAStrategy,
    communities,
    save_shards,
    split_edges,
    through_layers,
)

NUM_RANKS = 2


class LinkPredictor(pl.LightningModule):
    """An ordinary module: a GraphSAGE encoder, and a decoder of the product of two embeddings."""

    def __init__(self, num_features: int, hidden: int = 64) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, hidden), SAGEConv(hidden, hidden)])
        self.decoder = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
        self.ranking = LinkRanking(hits=[1, 10])

    def layers(self):
        return [partial(self.layer, conv) for conv in self.convs]

    def layer(self, conv, batch):  # of one hop; batch.x is what the layer before returned
        x = conv((batch.x, batch.x[: batch.batch_size]), batch.blocks[0].adj)
        return x if conv is self.convs[-1] else x.relu()

    def forward(self, batch):
        embedding = through_layers(self, batch)
        sender, receiver = batch.edge_label_index
        return self.decoder(embedding[sender] * embedding[receiver]).squeeze(1)

    def training_step(self, batch):
        return functional.binary_cross_entropy_with_logits(self(batch), batch.edge_label)

    def validation_step(self, batch):
        self.ranking.update(self(batch), batch.edge_label)
        self.log_dict(self.ranking, prog_bar=True, batch_size=int(batch.edge_label.sum()))

    test_step = validation_step

    def predict_step(self, batch):  # rows of nodes: their products rank all pairs
        return through_layers(self, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


def data_of(shards):
    options = {"sampler": NeighborSampler([10, 5]), "batch_size": 512}
    if shards is not None and shards.exists():
        return LinkDataModule(shards, **options)
    graph = communities(num_nodes=8_000, num_classes=40, homophily=0.9, noise=1.0)
    split = split_edges(graph, val=0.02, test=0.05, negatives=50)
    if shards is None:
        return LinkDataModule(split, **options)
    # What one host does, once; then each host takes shares.json and its own shard.
    save_shards(split, MetisPartitioner()(split.graph, NUM_RANKS, seed=0), shards)
    return LinkDataModule(shards, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=Path, help="the folder of the shards; made where there is none")
    data = data_of(parser.parse_args().shards)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=TMAStrategy(EverySeconds(2)),
        max_epochs=4,
        enable_checkpointing=False,
        logger=False,
    )
    model = LinkPredictor(num_features=64)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: every held edge once, among its negatives, wherever they lie
