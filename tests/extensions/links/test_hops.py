"""Held links are judged by rows of the whole graph, though layers count the degrees of senders."""

from typing import Any

import torch
from torch_geometric.nn import GCNConv

from lightning_gnn_dist import Evaluation, Graph, LinkDataModule, NeighborSampler, split_edges
from tests.data_fitting import trainer
from tests.layers.test_sight import NUM_NODES, C, F, Net, W, sparse_data


def test_rows_of_held_links() -> None:
    class Embeds(Net):
        def test_step(self, batch: Any) -> None:
            self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), self(batch).detach(), strict=True))

    torch.manual_seed(1)
    module = Embeds(GCNConv(F, W), GCNConv(W, C)).double()
    split = split_edges(Graph.from_pyg(sparse_data()), val=0.1, test=0.1, seed=0)
    data = LinkDataModule(split, sampler=NeighborSampler([3, 3]), batch_size=5, evaluation=Evaluation(batch_size=5))
    trainer(1).test(module, data, verbose=False)
    senders = split.graph.indices.long()
    receivers = torch.arange(NUM_NODES).repeat_interleave(split.graph.degrees())
    with torch.no_grad():
        expected = module.whole(split.graph.node_arrays["x"], torch.stack([senders, receivers]))
    assert module.rows
    assert all(torch.allclose(row, expected[node], rtol=0, atol=1e-12) for node, row in module.rows.items())
