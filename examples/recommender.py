"""Recommend films by what a user has watched last, with two processes, each on its own part of the graph.

python examples/recommender.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    LazyAdam,
    LinkDataModule,
    LinkRanking,
    TemporalSampler,
    split_edges,
)

WATCHES, BACK = ("user", "watches", "film"), ("film", "rev_watches", "user")
GENRES, DAYS = 20, 1_000


def evenings(num_users=800, num_films=400, num_events=60_000, seed=0):
    """Who watched what, and when. Tastes change with the seasons; of which genre a film is, nobody has written down."""
    draw = torch.Generator().manual_seed(seed)
    genre = torch.randint(GENRES, (num_films,), generator=draw)
    tastes = torch.randint(GENRES, (num_users, 5), generator=draw)
    user = torch.randint(num_users, (num_events,), generator=draw)
    day = torch.randint(DAYS, (num_events,), generator=draw)
    taste = tastes[user, day * 5 // DAYS]
    likes = 0.005 + torch.stack([(genre == number).float() for number in range(GENRES)])
    film = torch.multinomial(likes[taste], 1, generator=draw).view(-1)
    data = HeteroData()
    data["user"].num_nodes, data["film"].num_nodes = num_users, num_films
    data[WATCHES].edge_index, data[WATCHES].day = torch.stack([user, film]), day
    data[BACK].edge_index, data[BACK].day = data[WATCHES].edge_index.flip(0), day
    return data


class Recommender(pl.LightningModule):
    """A film is a row that is learned, a user the mean of what was watched last: new users need no training."""

    def __init__(self, num_films, hidden=32):
        super().__init__()
        self.films = nn.Embedding(num_films, hidden, sparse=True)  # ranks exchange rows that were touched, no others
        nn.init.normal_(self.films.weight, std=0.1)
        self.nobody = nn.Parameter(torch.zeros(1, hidden))  # a user who has watched nothing yet
        self.conv = SAGEConv(hidden, hidden)
        self.ranking = LinkRanking(hits=[1, 10])

    def forward(self, batch):
        films = self.films(batch["film"].n_id)
        (blocks,) = batch.blocks
        block = blocks[BACK]
        users = self.conv((films, self.nobody.expand(block.num_dst, -1)), block.adj)
        user, film = batch[WATCHES].edge_label_index  # among the first rows of each type
        return (users[user] * films[film]).sum(1)

    def training_step(self, batch):
        return functional.binary_cross_entropy_with_logits(self(batch), batch[WATCHES].edge_label)

    def validation_step(self, batch):
        label = batch[WATCHES].edge_label
        self.ranking.update(self(batch), label)
        self.log_dict(self.ranking, prog_bar=True, batch_size=int(label.sum()))

    test_step = validation_step

    def configure_optimizers(self):
        return LazyAdam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    graph = Graph.from_pyg(evenings(), time="day")
    split = split_edges(graph, val=0.1, test=0.1, negatives=50, edge_type=WATCHES, time="day")  # the last are to test
    # The six films watched last before the evening in question. Nobody asks who else has watched a film.
    sampler = TemporalSampler({BACK: [6], WATCHES: [0]}, time="day", pick="latest")
    data = LinkDataModule(split, sampler=sampler, batch_size=512)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(), max_epochs=4, logger=False)
    model = Recommender(graph.types.num_nodes["film"])
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: every test event once, ranked among 50 films
