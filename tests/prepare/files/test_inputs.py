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


def several(folder: Path) -> None:
    np.save(folder / "000.npy", EDGES[:, :40])
    np.save(folder / "001.npy", EDGES[:, 40:60].T.astype(">i8"))
    np.save(folder / "002.npy", EDGES[:, 60:])


def array(change: Callable[[Edges], Edges]) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / "edges.npy", change(EDGES))


def text(name: str, separator: str, heading: str = "") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        rows = heading + "".join(f"{sender}{separator}{receiver}\n" for sender, receiver in EDGES.T)
        (folder / name).write_bytes(gzip.compress(rows.encode()) if name.endswith(".gz") else rows.encode())

    return write


FORMS: dict[str, Callable[[Path], None]] = {
    "npy": array(lambda edges: edges),
    "by column": array(np.asfortranarray),
    "pairs": array(lambda edges: np.ascontiguousarray(edges.T).astype(np.uint32)),
    "pairs by column": array(lambda edges: edges.T.astype(np.int32)),
    "several": several,
    "table": text("edges.tsv", "\t", "source\ttarget\n"),
    "packed": text("edges.txt.gz", " "),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "edges").mkdir()
    return tmp_path / "edges"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_graph(form: Callable[[Path], None], folder: Path, tmp_path: Path) -> None:
    form(folder)
    graph = prepared(folder, tmp_path / "graph", memory_bytes=500)
    order = np.lexsort((EDGES[0], EDGES[1]))
    assert graph.num_nodes == EDGES.max() + 1
    assert np.array_equal(graph.indices.numpy(), EDGES[0][order])
    assert np.array_equal(graph.degrees().numpy(), np.bincount(EDGES[1]))


def cut(form: str, end: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        FORMS[form](folder)
        (file,) = folder.iterdir()
        file.write_bytes(file.read_bytes()[:end])

    return write


def saved(name: str, edges: object) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, np.array(edges))


def beyond_the_nodes(folder: Path) -> None:
    (folder / "edge_index").mkdir()
    for name, numbers in (("000", EDGES[:, EDGES.max(0) < 30]), ("001", EDGES)):
        np.save(folder / "edge_index" / f"{name}.npy", numbers)
    np.save(folder / "y.npy", np.zeros(30, np.int64))


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (cut("npy", -1), "is truncated: it has 1,743 bytes, and its header promises 1,744"),
    (cut("npy", 50), "is no .npy file, or is truncated"),
    (cut("packed", -20), "is no table, or is damaged .*Unexpected end of GZIP"),
    (lambda folder: (folder / "e.csv").write_text("1,2\n3,4\n5"), "e.csv, line 3: 1 cells, but there are 2 columns"),
    (saved("edges.npy", [[0], [-3]]), "edges.npy names the receiver -3, but ids begin at 0"),
    (beyond_the_nodes, "001.npy names the (sender|receiver) 3[0-9], but there are 30 nodes"),
    (saved("x.npy", np.zeros((5, 3))), r"x.npy must hold integers of shape \(2, E\) or \(E, 2\), got float64 \(5, 3\)"),
    (lambda folder: None, "holds no edges: give a .npy"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_what_is_no_list_of_edges_is_refused(damage, message, folder, tmp_path) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        prepare_graph(folder, tmp_path / "graph", memory_bytes=500)
    assert not (tmp_path / "graph").exists()
