"""Edges in files: whatever they lie in, the same edges piece by piece; and no edge out of a damaged file."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_gnn_dist import prepare_graph
from tests.prepare.test_prepare_graph import prepared

Edges = NDArray[np.int64]
EDGES: Edges = np.random.default_rng(0).integers(0, 40, (2, 101))


def one_npy(folder: Path) -> Path:
    np.save(folder / "edges.npy", EDGES)
    return folder / "edges.npy"


def by_column(folder: Path) -> Path:
    np.save(folder / "edges.npy", np.asfortranarray(EDGES))
    return folder / "edges.npy"


def pairs(folder: Path) -> Path:
    np.save(folder / "edges.npy", np.ascontiguousarray(EDGES.T).astype(np.uint32))
    return folder / "edges.npy"


def pairs_by_column(folder: Path) -> Path:
    np.save(folder / "edges.npy", EDGES.T.astype(np.int32))
    return folder / "edges.npy"


def several(folder: Path) -> Path:
    np.save(folder / "000.npy", EDGES[:, :40])
    np.save(folder / "001.npy", EDGES[:, 40:60].T.astype(">i8"))
    np.save(folder / "002.npy", EDGES[:, 60:])
    return folder


def table(folder: Path) -> Path:
    rows = [f"{sender}\t{receiver}\n" for sender, receiver in EDGES.T]
    (folder / "edges.tsv").write_text("".join(["source\ttarget\n", *rows, "\n"]))
    return folder / "edges.tsv"


def zipped(folder: Path) -> Path:
    rows = "".join(f"{sender} {receiver}\n" for sender, receiver in EDGES.T)
    (folder / "edges.txt.gz").write_bytes(gzip.compress(rows.encode()))
    return folder / "edges.txt.gz"


FORMS = [one_npy, by_column, pairs, pairs_by_column, several, table, zipped]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "edges").mkdir()
    return tmp_path / "edges"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_graph(form: Callable[[Path], Path], folder: Path, tmp_path: Path) -> None:
    graph = prepared(form(folder), tmp_path / "graph", memory_bytes=500)
    order = np.lexsort((EDGES[0], EDGES[1]))
    assert graph.num_nodes == EDGES.max() + 1
    assert np.array_equal(graph.indices.numpy(), EDGES[0][order])
    assert np.array_equal(graph.degrees().numpy(), np.bincount(EDGES[1]))


def truncated_npy(folder: Path) -> str:
    file = one_npy(folder)
    file.write_bytes(file.read_bytes()[:-1])
    return r"is truncated: it has 1,743 bytes, and its header promises 1,744"


def truncated_header(folder: Path) -> str:
    file = one_npy(folder)
    file.write_bytes(file.read_bytes()[:50])
    return "is no .npy file, or is truncated"


def truncated_gzip(folder: Path) -> str:
    file = zipped(folder)
    file.write_bytes(file.read_bytes()[:-20])
    return "is damaged or truncated"


def truncated_row(folder: Path) -> str:
    (folder / "edges.csv").write_text("1,2\n3,4\n5")
    return r"edges.csv, line 3: 1 cells, but there are 2 columns"


def negative(folder: Path) -> str:
    np.save(folder / "edges.npy", np.array([[0], [-3]]))
    return r"edges.npy names the receiver -3, but ids begin at 0"


def beyond_the_nodes(folder: Path) -> str:
    (folder / "edge_index").mkdir()
    for name, numbers in (("000", EDGES[:, EDGES.max(0) < 30]), ("001", EDGES)):
        np.save(folder / "edge_index" / f"{name}.npy", numbers)
    np.save(folder / "y.npy", np.zeros(30, np.int64))
    return r"001.npy names the (sender|receiver) 3[0-9], but there are 30 nodes"


def no_edges(folder: Path) -> str:
    np.save(folder / "x.npy", np.zeros((5, 3)))
    return r"x.npy must hold integers of shape \(2, E\) or \(E, 2\), got float64 \(5, 3\)"


def empty(folder: Path) -> str:
    return "holds no edges: give a .npy"


@pytest.mark.parametrize(
    "damage",
    [truncated_npy, truncated_header, truncated_gzip, truncated_row, negative, beyond_the_nodes, no_edges, empty],
)
def test_what_is_no_list_of_edges_is_refused(damage: Callable[[Path], str], folder: Path, tmp_path: Path) -> None:
    message = damage(folder)
    with pytest.raises(ValueError, match=message):
        prepare_graph(folder, tmp_path / "graph", memory_bytes=500)
    assert not (tmp_path / "graph").exists()
