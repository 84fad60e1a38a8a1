"""Users' ids are those of one array of all files, and no more of the files is read than is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph.storage import mapped_ids
from lightning_gnn_dist.graph.storage.mapped_ids import IdIndex, MappedIds
from lightning_gnn_dist.graph.user_ids import NodeColumns, ids_beside, ids_for, user_ids
from tests.memory import Peak, reads_memory

WORDS = [np.array(["b", "a"]), np.array(["longer", "ü"]), np.array(["c"])]
NUMBERS = [np.array([7, -3, 900]), np.array([2**40])]


@pytest.mark.parametrize("files", [WORDS, NUMBERS, WORDS[:1], NUMBERS[1:]])
def test_files_are_read_as_one_array(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_ids, "_AT_ONCE", 2)
    ids, whole = MappedIds(files), np.concatenate(files)
    count = len(ids)
    assert count == len(whole) and ids.dtype == whole.dtype and ids.whole().tolist() == whole.tolist()
    nodes = np.array([*range(count), *reversed(range(count)), 0])
    assert ids[nodes].tolist() == whole[nodes].tolist() and ids[nodes[:0]].tolist() == []
    assert np.concatenate(list(ids.pieces())).tolist() == whole.tolist()
    for first in range(count + 2):
        assert ids.first(first).whole().tolist() == whole[:first].tolist()
    missing = np.array(["zz"]) if whole.dtype.kind == "U" else np.array([5])
    assert ids.places(np.concatenate([whole[::-1], missing])).tolist() == [*reversed(range(count)), -1]
    index = IdIndex(ids)
    assert [index.find(name) for name in whole.tolist()] == list(range(count))
    strange: list[Any] = ["zz", "b\0", "\ud800", "x" * 999, 5, 2**80, -(2**80), 7.0, True, None, ["b"]]
    assert [index.find(name) for name in strange] == [None] * len(strange)


@reads_memory
@pytest.mark.parametrize("grows", [False, True])
def test_no_more_is_read_than_is_asked_for(grows: bool, tmp_path: Path) -> None:
    """The ids of half a million nodes take 16 MB, and as much again in a log."""
    count, path = 500_000, tmp_path / "graph"
    Graph.from_edge_index(torch.zeros(2, 1).long(), count, {"x": torch.zeros(count, 1)}).save(path)
    (path / "ids").mkdir()
    names = np.char.add("W", np.arange(2 * count).astype("U7"))
    np.save(path / "ids" / "nodes.npy", names[:count])
    if grows:
        Graph.open(path).extended({"x": torch.zeros(count, 1), "id": names[count:]})
    total = len(Graph.open(path).node_arrays["x"])
    nodes = np.array([3, total - 1, 400_000, 3])
    with Peak("VmRSS") as peak:
        found = ids_for(None, path, "", total)
        assert NodeColumns(found, nodes)(0, np.zeros((4, 1)))["node"].tolist() == names[nodes].tolist()
    assert found is not None and len(found) == total
    assert peak.added_bytes < 4 << 20
    assert user_ids(path)[-1] == names[total - 1]
    if grows:
        with Peak("RssAnon") as peak:
            Graph.open(path).save(tmp_path / "copy")
        assert peak.added_bytes < 24 << 20
        written = ids_beside(tmp_path / "copy", "")
        assert written is not None and len(written.files) == 1 and (written.whole() == names).all()
