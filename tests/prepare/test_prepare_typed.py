"""A typed graph prepared in bounded memory is the one prepared in memory, also after kills; bad arrays are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph import rows as rows_module
from tests.graph.equal import check_equal
from tests.graph.typed.graphs import save_arrays, small
from tests.prepare.kills import until_it_is_there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small graph in arrays, one of them in two files; the edges of one type as a text."""
    data = small()
    save_arrays(data, tmp_path / "arrays")
    text = tmp_path / "arrays" / "edges" / "venue__of__paper"
    np.savetxt(text.with_suffix(".csv"), np.load(text / "edge_index.npy").T, "%d", ",")
    (text / "edge_index.npy").unlink()
    text.rmdir()
    return tmp_path / "arrays"


def in_memory(folder: Path, time: str | None, *, reverse: bool = False, float_labels: bool = False) -> Graph:
    """The graph that PyG would have of the arrays and the text."""
    data = HeteroData()
    for place in sorted((folder / "nodes").iterdir()):
        for file in sorted(place.glob("*.npy")):
            array = np.load(file)
            data[place.name][file.stem] = torch.from_numpy(array) if array.ndim else int(array)
    for place in sorted((folder / "edges").iterdir()):
        source, name, target = kind = tuple(place.name.removesuffix(".csv").split("__"))
        if place.is_dir():
            data[kind].update({file.stem: torch.from_numpy(np.load(file)) for file in place.glob("*.npy")})
        else:
            data[kind].edge_index = torch.from_numpy(np.loadtxt(place, np.int64, delimiter=",", ndmin=2).T.copy())
    for source, name, target in list(data.edge_types) if reverse else []:
        store = data[source, name, target].to_dict()
        data[target, f"rev_{name}", source].update(store | {"edge_index": store["edge_index"].flip(0)})
    return Graph.from_pyg(data, time=time, float_labels=float_labels)


@pytest.mark.parametrize("memory_bytes", [1_500, 2_000_000_000])
@pytest.mark.parametrize("time", [None, "time"])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_the_graph_from_memory(folder, time, reverse, memory_bytes, monkeypatch) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", 5)
    out = folder.parent / "graph"
    prepare_graph(folder, out, time=time, reverse=reverse, memory_bytes=memory_bytes)
    check_equal(Graph.open(out), in_memory(folder, time, reverse=reverse))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["arrays", "graph"]


def test_it_goes_on_after_any_kill(folder: Path) -> None:
    out = folder.parent / "graph"
    settings: dict[str, Any] = {"time": "time", "reverse": True, "memory_bytes": 1_500, "overwrite": True}
    until_it_is_there(out, 1, lambda on_progress: prepare_graph(folder, out, **settings, on_progress=on_progress))
    check_equal(Graph.open(out), in_memory(folder, "time", reverse=True))


def test_an_array_in_several_files_and_a_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = folder / "nodes" / "author" / "x.npy"
    whole = np.load(x)
    (x.parent / "x").mkdir()
    np.save(x.parent / "x" / "0.npy", whole[:3])
    np.save(x.parent / "x" / "1.npy", whole[3:])
    x.unlink()
    (folder / "nodes" / "paper" / "train_mask.npy").unlink()
    main(["prepare", str(folder), str(folder.parent / "graph"), "--split", "0.5", "0.25", "0.25"])
    said = capsys.readouterr()
    assert "22 nodes of 3 types, 99 edges" in said.out and "6 train" in said.out
    assert "There is no train_mask" not in said.out and "sorting author writes paper" in said.err
    opened = Graph.open(folder.parent / "graph")
    assert torch.equal(opened.types.node_arrays["author"]["x"], torch.from_numpy(whole))


@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_label_that_is_nan_is_no_label(columns: tuple[int, ...], folder: Path, logged: list[str]) -> None:
    y = np.random.default_rng(0).random((12, *columns))
    y[[0, 3, 4]] = np.nan
    np.save(folder / "nodes" / "paper" / "y.npy", y)
    np.save(folder / "nodes" / "author" / "y.npy", np.ones(7))
    settings: dict[str, Any] = {"float_labels": True}
    expected = in_memory(folder, None, **settings)
    assert "2 nodes of train_mask of type 'paper' have NaN for a label, and are left out of it" in "".join(logged)
    assert expected.types.node_arrays["paper"]["train_mask"].nonzero().view(-1).tolist() == [2, 6, 8, 10]
    prepare_graph(folder, folder.parent / "graph", **settings)
    check_equal(Graph.open(folder.parent / "graph"), expected)
    assert re.search(r"2 nodes of train_mask of .*paper have NaN for a label", "".join(logged))


def array(name: str, values: Any) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / name, np.array(values))


def by_no_such_venue(folder: Path) -> None:
    (folder / "edges/venue__by__paper.csv").write_text("a,b\n3,0\n")


CITES, IN_TIME = "edges/paper__cites__paper", {"time": "time"}
NAN_TIMES = array("nodes/paper/time.npy", [np.nan] * 12)
BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "a sender of another type": (
        by_no_such_venue,
        {},
        "by__paper.csv: column 'a' holds '3' in row 1, but there are 3 n",
    ),
    "too few of what edges carry": (array(f"{CITES}/time.npy", [1.0]), {}, r"time has shape \(1,\), and there are 40"),
    "weights that are NaN": (array(f"{CITES}/w.npy", [np.nan] * 40), {}, r"'cites', 'paper'\]: w holds NaN"),
    "times that are NaN": (NAN_TIMES, IN_TIME, "time of node 0 is NaN"),
    "times in columns": (array(f"{CITES}/time.npy", np.ones((40, 2))), IN_TIME, "time must hold one number"),
    "another length": (
        array("nodes/author/x.npy", np.ones((6, 1))),
        {},
        r"data\['author'\]: train_mask has shape \(7,\)",
    ),
    "regression of classes": (lambda folder: None, {"float_labels": True}, "no type has a y of fractions"),
    "not of types": (lambda folder: None, {"source": "nodes"}, "nodes holds no edges: give a .npy"),
}


@pytest.mark.parametrize(("change", "options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_right_is_refused(folder, change, options, message) -> None:
    change(folder)
    source = folder / options.get("source", ".")
    options = {name: value for name, value in options.items() if name != "source"}
    with pytest.raises(ValueError, match=message):
        prepare_graph(source, folder.parent / "graph", **options)
    assert not (folder.parent / "graph").exists()
