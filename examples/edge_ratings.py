"""Learn how users rate films, with two processes, each on its own part of the graph.

python examples/edge_ratings.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv
from torchmetrics import R2Score

from lightning_gnn_dist import Graph, GrappaStrategy, LinkDataModule, NeighborSampler, split_edges

RATES, BACK = ("user", "rates", "film"), ("film", "rev_rates", "user")
TASTES = 8


def ratings(num_users=3_000, num_films=1_000, num_ratings=60_000, seed=0):
    """Users mostly watch what is to their taste; how much they like it also depends on the film."""
    draw = torch.Generator().manual_seed(seed)
    taste, genre = (torch.randint(TASTES, (count,), generator=draw) for count in (num_users, num_films))
    quality = torch.randn(num_films, generator=draw)
    user = torch.randint(num_users, (num_ratings,), generator=draw)
    of_taste = torch.stack([(genre == number).float() for number in range(TASTES)])
    film = torch.multinomial(0.2 + of_taste[taste[user]], 1, generator=draw).view(-1)
    likes = 2.0 * (taste[user] == genre[film]) + quality[film]
    data = HeteroData()
    data["user"].x = functional.one_hot(taste, TASTES) + torch.randn(num_users, TASTES, generator=draw)
    data["film"].x = functional.one_hot(genre, TASTES) + quality[:, None]
    data[RATES].edge_index = torch.stack([user, film])
    data[RATES].rating = 5 + likes + 0.5 * torch.randn(num_ratings, generator=draw)
    data[BACK].edge_index = data[RATES].edge_index.flip(0)
    return data


class Rater(pl.LightningModule):
    """Two layers of GraphSAGE in both directions, and a decoder of a user's row and a film's."""

    def __init__(self, hidden=32):
        super().__init__()
        self.first = nn.ModuleDict({kind[1]: SAGEConv(TASTES, hidden) for kind in (RATES, BACK)})
        self.last = nn.ModuleDict({kind[1]: SAGEConv(hidden, hidden) for kind in (RATES, BACK)})
        self.decoder = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.r2 = R2Score()

    def forward(self, batch):
        x = batch.x_dict
        for convs, blocks in zip((self.first, self.last), batch.blocks, strict=True):
            rows = {}
            for source, name, target in (RATES, BACK):
                block = blocks[source, name, target]
                ends = x[source], x[target][: block.num_dst]
                rows[target] = convs[name](ends, block.adj).relu()
            x = rows
        user, film = batch[RATES].edge_label_index  # among the first rows of each type
        ends = x["user"][user], x["film"][film]
        return 5 + self.decoder(torch.cat([*ends, ends[0] * ends[1]], 1)).squeeze(1)

    def training_step(self, batch):
        return functional.mse_loss(self(batch), batch[RATES].edge_label)

    def validation_step(self, batch):
        label = batch[RATES].edge_label
        self.r2.update(self(batch), label)
        self.log("r2", self.r2, prog_bar=True, batch_size=len(label))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    graph = Graph.from_pyg(ratings())
    split = split_edges(graph, val=0.05, test=0.1, edge_type=RATES, labels="rating")  # "rev_rates" goes with them
    data = LinkDataModule(split, sampler=NeighborSampler([10, 10]), batch_size=512)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(), max_epochs=3, logger=False)
    model = Rater()
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: every test rating once
