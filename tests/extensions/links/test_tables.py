"""Tables of the best links, whose nodes have the ids of the tables that their graph was prepared from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_gnn_dist as lgd
from tests.callbacks.test_predictions import COUNT, NAMES, Rows, prepared, start
from tests.ranks import run_ranks


def write(rank: int, world_size: int, folder: Path) -> None:
    split = lgd.split_edges(lgd.Graph.open(folder / "graph"), negatives=1)
    how: dict[str, Any] = {"score": "dot", "senders": [5, 3], "k": 99, "leave_out": ["edges", "val", "test"]}
    lgd.best_links(start(), Rows(), split, folder / "links.parquet", ids_of=folder / "graph", **how)


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    graph = lgd.Graph.open(prepared(tmp_path))
    run_ranks(write, 2, tmp_path)
    table = parquet.read_table(tmp_path / "links.parquet").to_pydict()
    edges: Any = graph.to_pyg().edge_index
    linked = {(s, r) for s, r in edges.T.tolist()}
    found = list(zip(table["sender"], table["receiver"], strict=True))
    assert found[0][0] == NAMES[5] and {sender for sender, _ in found} == {NAMES[5], NAMES[3]}
    assert set(found) == {(NAMES[s], NAMES[r]) for s in (5, 3) for r in range(COUNT) if (s, r) not in linked}
    split_rows = (
        Rows().conv(graph.node_arrays["x"], lgd.split_edges(graph, negatives=1).graph.to_pyg().edge_index).detach()
    )
    scores = [float(split_rows[NAMES.index(s)] @ split_rows[NAMES.index(r)]) for s, r in found]
    np.testing.assert_allclose(table["score"], scores, atol=1e-4)
