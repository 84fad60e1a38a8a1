"""Arrays per node in one file or several, read some rows at a time, and what a folder of them says of a graph."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.prepare.arrays import RowFiles
from lightning_gnn_dist.prepare.plan import Plan, plan_of
from tests.prepare.test_prepare_graph import prepared

X = np.random.default_rng(0).normal(size=(50, 3, 2)).astype(np.float16)


def headers(folder: Path, *drop: str) -> Plan:
    return plan_of(folder, None, drop, None, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "edge_index").mkdir(parents=True)
    np.save(folder / "edge_index" / "0.npy", np.arange(20).reshape(2, 10))
    (folder / "features").mkdir()
    for at, rows in enumerate(np.split(X, [7, 7, 30])):
        np.save(folder / "features" / f"{at}.npy", rows)
    return folder


@pytest.mark.parametrize("first", [0, 6, 7, 29, 50])
def test_rows_come_in_pieces_from_any_row_on(folder: Path, first: int) -> None:
    rows = RowFiles.of(folder / "features")
    assert rows.shape == (50, 3, 2)
    found = list(rows.pieces(first, 5 * rows.bytes_per_row))
    assert all(len(piece) <= 5 for piece in found)
    assert np.array_equal(np.concatenate([X[:0], *found]), X[first:])


def test_features_in_several_files_become_one_array(folder: Path, tmp_path: Path) -> None:
    graph = prepared(folder, tmp_path / "graph", memory_bytes=400)
    assert graph.num_nodes == 50 and np.array_equal(graph.node_arrays["x"].numpy(), X)
    assert (tmp_path / "graph" / "nodes" / "x.npy").read_bytes()[128:] == X.tobytes()


def test_nodes_may_be_counted_without_an_array(folder: Path, tmp_path: Path) -> None:
    np.save(folder / "num_nodes.npy", 77)
    assert prepared(folder, tmp_path / "graph", drop=["features"]).num_nodes == 77
    (folder / "num_nodes.npy").unlink()
    assert prepared(folder, tmp_path / "second", drop=["features"]).num_nodes == 20


def test_only_headers_are_read_beforehand(folder: Path) -> None:
    huge = folder / "embedding.npy"  # a sparse file: 200 GB that nobody could read
    np.lib.format.open_memmap(huge, mode="w+", dtype=np.float32, shape=(50, 10**9)).flush()
    assert headers(folder).nodes[""].arrays["embedding"].shape == (50, 10**9)


def test_files_of_one_array_must_be_alike(folder: Path) -> None:
    np.save(folder / "features" / "9.npy", np.zeros((4, 3, 2), np.float32))
    with pytest.raises(ValueError, match=r"9.npy holds rows of float32 \(3, 2\), but .*0.npy rows of float16"):
        headers(folder)
    np.save(folder / "features" / "9.npy", np.asfortranarray(X))
    with pytest.raises(ValueError, match=r"stored by column: save numpy\.ascontiguousarray"):
        headers(folder)


def test_what_edges_carry_must_be_one_row_each(folder: Path) -> None:
    np.save(folder / "edge_attr.npy", np.zeros((11, 4)))
    with pytest.raises(ValueError, match=r"edge_attr has shape \(11, 4\), and there are 10 edges: leave it out"):
        headers(folder)
    assert not headers(folder, "edge_attr").edges["", "", ""].carried.arrays
    np.save(folder / "edge_attr.npy", np.zeros((10, 4)))
    assert headers(folder).edges["", "", ""].carried.bytes_per_edge == 32
    (folder / "edge_index" / "1.csv").write_text("1,2\n")
    with pytest.raises(ValueError, match="edge_index holds edges in tables and in arrays: write all as one table"):
        headers(folder)
    (folder / "edge_index" / "0.npy").unlink()
    with pytest.raises(ValueError, match="edge_attr is an array, and the edges are in a table, beside which none"):
        headers(folder)


def test_names_are_those_of_a_graph(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no 'nothing' to drop"):
        headers(folder, "nothing")
    np.save(folder / "x.npy", X)
    with pytest.raises(ValueError, match="two arrays for one purpose"):
        headers(folder)
    prepare_graph(folder, tmp_path / "graph", drop=["x"])
    assert list(Graph.open(tmp_path / "graph").node_arrays) == ["x"]
