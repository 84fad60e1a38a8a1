"""Tables of the rows of all nodes, which have the ids of the tables that their graph was prepared from."""

from pathlib import Path

import pytest

import lightning_gnn_dist as lgd
from tests.callbacks.test_tables import NAMES, NEW, Rows, by_hand, check, prepared, prepared_again, start
from tests.ranks import run_ranks


def write(rank: int, world_size: int, folder: Path) -> None:
    for name in ("graph", "later"):
        lgd.predict_by_layer(start(), Rows(), folder / name, folder / f"{name}.parquet")


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    before = lgd.Graph.open(prepared(tmp_path))
    later = prepared_again(tmp_path)
    run_ranks(write, 2, tmp_path)
    check(tmp_path / "graph.parquet", NAMES, NAMES, by_hand(before))
    check(tmp_path / "later.parquet", NAMES + NEW, NAMES + NEW, by_hand(later))
