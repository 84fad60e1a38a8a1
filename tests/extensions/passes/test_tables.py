"""Tables of the rows of all nodes, which have the ids of the tables that their graph was prepared from."""

from pathlib import Path

import pytest

import lightning_gnn_dist as lgd
from tests.callbacks.test_predictions import NAMES, Rows, by_hand, check, prepared, start
from tests.ranks import run_ranks


def write(rank: int, world_size: int, folder: Path) -> None:
    lgd.predict_by_layer(start(), Rows(), folder / "graph", folder / "layers.parquet")


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    graph = lgd.Graph.open(prepared(tmp_path))
    run_ranks(write, 2, tmp_path)
    check(tmp_path / "layers.parquet", NAMES, NAMES, by_hand(graph))
