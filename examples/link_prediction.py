"""Predict links with two processes that meet by the clock, on parts that look alike (SuperTMA).

python examples/link_prediction.py                                                       # two processes
lightning-gnn-dist elastic --ranks 3 -- python examples/link_prediction.py --elastic     # three, any of which may die
"""

import argparse
from functools import partial

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySeconds,
    LinkDataModule,
    LinkRanking,
    NeighborSampler,
    TMAStrategy,
    communities,
    split_edges,
    through_layers,
)


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

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--elastic", action="store_true", help="every rank is a process of its own")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    graph = communities(num_nodes=8_000, num_classes=40, homophily=0.9, noise=1.0)
    data = LinkDataModule(
        split_edges(graph, val=0.02, test=0.05, negatives=50),
        sampler=NeighborSampler([10, 5]),
        batch_size=512,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if options.elastic else 2,
        strategy=TMAStrategy(EverySeconds(2), elastic=options.elastic),
        max_epochs=options.rounds,
        enable_checkpointing=False,
        logger=False,
    )
    model = LinkPredictor(num_features=64)
    trainer.fit(model, data)
    trainer.test(model, data)
