"""Links are learned from no values that would poison a training."""

import pytest

from lightning_gnn_dist import LinkDataModule, Loading, NeighborSampler, split_edges
from tests.graph.test_graph import NAN, spoilt


def test_links_are_learned_from_no_such_values() -> None:
    graph, node = spoilt("x", NAN)
    split = split_edges(graph, 0.1, 0.1, negatives=2)
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        next(iter(LinkDataModule(split, sampler=NeighborSampler([2])).train_dataloader()))
    unchecked = LinkDataModule(split, sampler=NeighborSampler([2]), loading=Loading(check_values=False))
    next(iter(unchecked.train_dataloader()))
