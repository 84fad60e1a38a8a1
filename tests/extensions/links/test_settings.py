"""Batches of links follow the laws of all batches: settings, copies, ids of seeds, and values that are refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import lightning_gnn_dist as lgd
from tests.data.test_settings import (
    GRAPH,
    PAPERS,
    SOME,
    all_batches,
    check,
    check_copies,
    check_threads_and_bulks,
    seen,
)
from tests.data_fitting import small_graph
from tests.graph.test_graph import NAN, spoilt
from tests.test_arguments_contract import check_words_of_pyg


def test_held_edges_are_judged_by_the_neighbours_that_are_drawn() -> None:
    graph = lgd.communities(300, 3, num_features=4, mean_degree=12.0)
    split = lgd.split_edges(graph, 0.1, 0.1, negatives=3)
    drawn = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([5, 5]), evaluation=SOME)
    for batch in drawn.val_dataloader():
        assert batch.blocks[-1].adj.crow_indices().diff().max() <= 2


def test_batches_follow_seed_everything() -> None:
    data = lgd.LinkDataModule(lgd.split_edges(small_graph()), batch_size=50)
    links = seen(data)
    pl.seed_everything(2, verbose=False)
    assert seen(data) != links


def test_copies_have_the_same_batches(tmp_path: Path) -> None:
    split = lgd.split_edges(small_graph())
    split.save(tmp_path / "split")
    for place in (split, tmp_path / "split"):
        check_copies(lgd.LinkDataModule(place, batch_size=500))


MADE: dict[str, Callable[..., Any]] = {
    "links": partial(lgd.LinkDataModule, lgd.split_edges(small_graph()), batch_size=500),
    "links of whole parts": partial(
        lgd.LinkDataModule, lgd.split_edges(small_graph()), sampler=lgd.WholePartSampler(2)
    ),
    "typed links": partial(
        lgd.LinkDataModule, lgd.split_edges(PAPERS, edge_type=("author", "writes", "paper")), batch_size=99
    ),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_threads_and_bulks_change_nothing(make: Callable[..., Any]) -> None:
    check_threads_and_bulks(make)


def test_words_of_pyg_are_answered() -> None:
    check_words_of_pyg(lgd.LinkDataModule, lgd.split_edges(small_graph()))


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


def test_links_are_learned_from_no_such_values() -> None:
    graph, node = spoilt("x", NAN)
    split = lgd.split_edges(graph, 0.1, 0.1, negatives=2)
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        next(iter(lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2])).train_dataloader()))
    unchecked = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2]), loading=lgd.Loading(check_values=False))
    next(iter(unchecked.train_dataloader()))
