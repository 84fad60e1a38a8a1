"""Batches of links say which held edge they judge, and have labels of seeds alone."""

import pytest

import lightning_gnn_dist as lgd
from tests.data.test_settings import GRAPH, all_batches, check


def test_links_say_which_held_edge_they_are() -> None:
    split = lgd.split_edges(GRAPH, 0.2, 0.1, negatives=2)
    data = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([4]), batch_size=50)
    for batch in data.val_dataloader():
        number = int(batch.edge_label.sum())
        assert split.edges["val"][:, batch.input_id].equal(batch.n_id[batch.edge_label_index[:, :number]])
    with pytest.raises(AttributeError, match="batches of training links have none"):
        _ = next(iter(data.train_dataloader())).input_id


def test_batches_of_links() -> None:
    split = lgd.split_edges(lgd.communities(200, 4, num_features=4), 0.1, 0.1, negatives=2)
    for batch in all_batches(lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([3, 2]), batch_size=30)):
        check(batch, split.graph.node_arrays["y"], all_labels=False)
