"""A link predictor as a user writes it: a SAGE encoder and a decoder of the product."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Graph, LinkRanking, LinkSplit

Targets = list[tuple[int, int, float]]


def edges_of(graph: Graph) -> Tensor:
    """All senders and receivers, in the order of ``graph.indices``."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return torch.stack([graph.indices.long(), receivers])


class LinkSAGE(pl.LightningModule):
    """Records the targets it is asked for, with ids of the whole graph."""

    def __init__(self, num_features: int, *, lr: float = 0.01) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, 16), SAGEConv(16, 16)])
        self.decoder = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.ranking = LinkRanking(hits=[1, 5])
        self.lr = lr
        self.asked: list[Targets] = []
        self.judged: list[Targets] = []

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x if conv is self.convs[-1] else x.relu()
        sender, receiver = batch.edge_label_index
        scores: Tensor = self.decoder(x[sender] * x[receiver]).squeeze(1)
        return scores

    def training_step(self, batch: Any) -> Tensor:
        self.asked.append(targets_of(batch))
        return functional.binary_cross_entropy_with_logits(self(batch), batch.edge_label)

    def validation_step(self, batch: Any) -> None:
        self.judged.append(targets_of(batch))
        self.ranking.update(self(batch), batch.edge_label)
        self.log_dict(dict(self.ranking), batch_size=int(batch.edge_label.sum()))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def targets_of(batch: Any) -> Targets:
    assert int(batch.edge_label_index.max()) < batch.batch_size
    senders, receivers = batch.n_id[batch.edge_label_index].tolist()
    return list(zip(senders, receivers, batch.edge_label.tolist(), strict=True))


def held(split: LinkSplit, name: str) -> Counter[tuple[int, int, float]]:
    """Everything that a split asks to be judged under this name, true and false."""
    edges, negatives = split.edges[name], split.negatives[name]
    true = [(sender, receiver, 1.0) for sender, receiver in edges.T.tolist()]
    rows = zip(edges[0].tolist(), negatives.tolist(), strict=True)
    return Counter(true + [(sender, receiver, 0.0) for sender, receivers in rows for receiver in receivers])


def ranks_by_hand(module: LinkSAGE, split: LinkSplit, name: str) -> Tensor:
    """The rank of each held edge among its negatives, from one forward over the whole graph."""
    edges, x = split.edges[name], split.graph.node_arrays["x"]
    edge_index = edges_of(split.graph)
    receivers = torch.cat([edges[1][:, None], split.negatives[name]], 1)
    with torch.no_grad():
        hidden = module.convs[1](module.convs[0](x, edge_index).relu(), edge_index)
        scores = module.decoder(hidden[edges[0]][:, None] * hidden[receivers]).squeeze(2)
    return 1 + (scores[:, 1:] > scores[:, :1]).sum(1) + (scores[:, 1:] == scores[:, :1]).sum(1) / 2
