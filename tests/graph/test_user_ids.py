"""Nodes are found by users' ids, and no more of the files is read than is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph import user_ids as ids_module
from lightning_gnn_dist.graph.user_ids import IdIndex, NodeColumns, ids_for, places_of, user_ids
from tests.memory import Peak, reads_memory


@pytest.mark.parametrize("ids", [["b", "a", "longer", "ü", "c"], [7, -3, 900, 2**40], ["b"]])
def test_a_node_is_found_by_its_id(ids: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "_AT_ONCE", 2)
    array = np.array(ids)
    missing = np.array(["zz"]) if array.dtype.kind == "U" else np.array([5])
    asked = np.concatenate([array[::-1], missing, array[:1]])
    assert places_of(array, asked).tolist() == [*reversed(range(len(ids))), -1, 0]
    index = IdIndex(array)
    assert [index.find(name) for name in ids] == list(range(len(ids)))
    strange: list[Any] = ["zz", "b\0", "\ud800", "x" * 999, 5, 2**80, -(2**80), 7.0, True, None, ["b"]]
    assert [index.find(name) for name in strange] == [None] * len(strange)


@reads_memory
def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """The ids of a million nodes take 32 MB."""
    count, path = 1_000_000, tmp_path / "graph"
    Graph.from_edge_index(torch.zeros(2, 1).long(), count, {"x": torch.zeros(count, 1)}).save(path)
    (path / "ids").mkdir()
    names = np.char.add("W", np.arange(count).astype("U7"))
    np.save(path / "ids" / "nodes.npy", names)
    nodes = np.array([3, count - 1, 400_000, 3])
    with Peak("VmRSS") as peak:
        found = ids_for(None, path, "", count)
        assert NodeColumns(found, nodes)(0, np.zeros((4, 1)))["node"].tolist() == names[nodes].tolist()
    assert found is not None and len(found) == count
    assert peak.added_bytes < 4 << 20
    with Peak("RssAnon") as peak:
        Graph.open(path).save(tmp_path / "copy")
    assert peak.added_bytes < 24 << 20
    assert (user_ids(tmp_path / "copy") == names).all()
