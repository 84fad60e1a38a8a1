"""Batches of links follow the laws of all batches: settings, copies, ids, values that are refused, and commands."""

import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.train import nodes_asked
from tests.callbacks.test_predictions import NAMES, prepared
from tests.cli.conftest import EXAMPLES, Command
from tests.cli.conftest import run_here as run_here
from tests.cli.test_prepare import check_files_are_compared
from tests.cli.test_train import check_config
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
    for _, batch in all_batches(lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([3, 2]), batch_size=30)):
        check(batch, split.graph.node_arrays["y"], all_labels=False)


def test_links_are_learned_from_no_such_values() -> None:
    graph, node = spoilt("x", NAN)
    split = lgd.split_edges(graph, 0.1, 0.1, negatives=2)
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        next(iter(lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2])).train_dataloader()))
    unchecked = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([2]), loading=lgd.Loading(check_values=False))
    next(iter(unchecked.train_dataloader()))


# Commands on splits of edges, and those that write links.


@pytest.mark.slow
def test_the_shipped_config_trains(tmp_path: Path) -> None:
    check_config("links.yaml", tmp_path, "mrr")


def test_a_split_of_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = lgd.split_edges(lgd.communities(2000))
    split.save(tmp_path / "split")
    main(["inspect", str(tmp_path / "split")])
    held = ", ".join(f"{edges.shape[1]:,} {name}" for name, edges in split.edges.items())
    assert f"held back beside them: {held}\n" in capsys.readouterr().out


def test_predict_writes_the_rows_of_nodes(tmp_path: Path, run_here: Command) -> None:
    config = (EXAMPLES / "configs" / "links.yaml").read_text()
    (tmp_path / "links.yaml").write_text(re.sub(r"num_nodes: \d+", "num_nodes: 500", config))
    config = ["predict", f"--config={tmp_path}/links.yaml", "--trainer.devices=1"]
    run_here(*config, f"--output={tmp_path}/all.npy")
    run_here(*config, f"--output={tmp_path}/some.npy", "--nodes=7,499,0")
    everything = np.load(tmp_path / "all.npy")
    np.testing.assert_allclose(np.load(tmp_path / "some.npy"), everything[[7, 499, 0]], atol=1e-5)


def test_nodes_are_named_by_ids_of_tables(tmp_path: Path) -> None:
    graph = lgd.Graph.open(prepared(tmp_path))
    data = lgd.LinkDataModule(lgd.split_edges(graph, negatives=1))
    options = Namespace(nodes=f"{NAMES[7]},{NAMES[2]}", by_user_id=True, ids_of=tmp_path / "graph")
    assert torch.as_tensor(nodes_asked(data, options)).tolist() == [7, 2]
    with pytest.raises(ValueError, match=r"^--by_user_id needs a prepared graph"):
        nodes_asked(data, Namespace(nodes="e", by_user_id=True, ids_of=None))


def test_all_files_are_compared_with_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgd.split_edges(lgd.communities(2000), negatives=2).save(tmp_path / "links")
    check_files_are_compared(tmp_path / "links", capsys)
