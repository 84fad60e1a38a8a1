"""Judge accounts by the payments that came before, with two processes, each on its own part of the graph.

python examples/temporal_graph.py
"""

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import Graph, GrappaStrategy, Halo, PartitionedDataModule, TemporalSampler, split_by_time

DAYS = 1000


def payments(num_accounts=4_000, num_payments=80_000, seed=0):
    """Accounts of two kinds, each judged on a day. What it has been paid before comes mostly from its own kind."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.randint(2, (num_accounts,), generator=draw)
    judged = torch.randint(DAYS // 5, DAYS, (num_accounts,), generator=draw)
    receiver = torch.randint(num_accounts, (num_payments,), generator=draw)
    day = torch.randint(DAYS, (num_payments,), generator=draw)
    share = torch.where(day < judged[receiver], 0.8, 0.1)  # once it is judged, those of its kind stay away
    wanted = torch.where(torch.rand(num_payments, generator=draw) < share, kind[receiver], 1 - kind[receiver])
    of_kind = [(kind == number).nonzero().view(-1) for number in range(2)]
    chosen = [ids[torch.randint(len(ids), (num_payments,), generator=draw)] for ids in of_kind]
    sender = torch.where(wanted == 0, *chosen)
    x = functional.one_hot(kind, 2) + torch.randn(num_accounts, 2, generator=draw)
    return Data(x=x, y=kind, time=judged, edge_index=torch.stack([sender, receiver]), edge_time=day)


class SAGE(pl.LightningModule):
    """Two layers of GraphSAGE, as for any graph."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(2, 32), SAGEConv(32, 2)])
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, batch):
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x.relu() if block is not batch.blocks[-1] else x
        return x

    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch.y)

    def validation_step(self, batch):
        self.accuracy(self(batch), batch.y)
        self.log("accuracy", self.accuracy, prog_bar=True, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    graph = split_by_time(Graph.from_pyg(payments()))  # the first accounts to learn from, the last to test
    sampler = TemporalSampler([10, 5], time="edge_time", seed_time="time")
    data = PartitionedDataModule(graph, boundary=Halo(), sampler=sampler, batch_size=256)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(), max_epochs=3, logger=False)
    model = SAGE()
    trainer.fit(model, data)
    trainer.test(model, data)  # each account by what had happened before the day on which it is judged
