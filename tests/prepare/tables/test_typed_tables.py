"""A graph with types from tables is that of the same ``HeteroData``; what cannot be right is refused by file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.user_ids import user_ids
from tests.graph.equal import check_equal
from tests.prepare.kills import before_the_last_record, while_work_is_removed

WRITES, CITES, AT = "author__writes__paper", "paper__cites__paper", "paper__at__venue"
ON = "edges/paper__on__venue.csv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Papers and authors with ids of their own, venues in arrays, edges with weights, labels and times."""
    tables = {
        "nodes/paper.csv": "id,year,label,split,words,pages\n10,3,b,train,0.5,2\n30,1,a,val,1.5,3\n20,2,b,,2.5,4\n",
        "nodes/author.tsv": "name\tage\nann\t31\nbob\t29\n",
        f"edges/{WRITES}.csv": "source,target,share\nbob,20,0.25\nann,10,1\nann,20,0.75\n",
        f"edges/{CITES}.csv": "old,new,year,label\n30,20,2,1\n30,10,9,0\n20,10,3,1\n",
    }
    for name, text in tables.items():
        (tmp_path / "tables" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tables" / name).write_text(text)
    of_arrays: dict[str, dict[str, Any]] = {"nodes/venue": {"num_nodes": 2, "x": [[1.0], [2.0]]}}
    of_arrays[f"edges/{AT}"] = {"edge_index": [[2], [1]]}
    for name, arrays in of_arrays.items():
        (tmp_path / "tables" / name).mkdir()
        for key, array in arrays.items():
            np.save(tmp_path / "tables" / name / f"{key}.npy", np.array(array))
    return tmp_path / "tables"


def by_hand() -> HeteroData:
    data = HeteroData()
    data["author"].x = torch.tensor([[31.0], [29.0]])
    data["paper"].x = torch.tensor([[0.5, 2.0], [1.5, 3.0], [2.5, 4.0]])
    data["paper"].y, data["paper"].year = torch.tensor([1, 0, 1]), torch.tensor([3, 1, 2])
    for name, marked in (("train", 0), ("val", 1), ("test", 9)):
        data["paper"][f"{name}_mask"] = torch.arange(3) == marked
    data["venue"].x = torch.tensor([[1.0], [2.0]]).double()
    data["author", "writes", "paper"].edge_index = torch.tensor([[1, 0, 0], [2, 0, 2]])
    data["author", "writes", "paper"].edge_share = torch.tensor([0.25, 1.0, 0.75])
    data["paper", "at", "venue"].edge_index = torch.tensor([[2], [1]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[1, 1, 2], [2, 0, 0]])
    data["paper", "cites", "paper"].y = torch.tensor([1, 0, 1])
    data["paper", "cites", "paper"].year = torch.tensor([2, 9, 3])
    return data


def prepare(folder: Path, *options: str) -> Graph:
    main(["prepare", str(folder), str(folder.parent / "graph"), "--overwrite", *options])
    return Graph.open(folder.parent / "graph")


def test_tables_of_all_kinds_become_the_graph_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_equal(prepare(folder, "--time", "year"), Graph.from_pyg(by_hand(), time="year"))
    said = capsys.readouterr().out
    assert "7 nodes of 3 types, " in said
    assert f"{CITES}.csv: line 1 is taken as heading: old, new, year, label." in said
    assert "paper cites paper" in said


def test_it_goes_on_after_a_kill_that_leaves_ids(folder: Path) -> None:
    before_the_last_record(lambda: prepare(folder, "--time", "year"))
    check_equal(Graph.open(folder.parent / "graph"), Graph.from_pyg(by_hand(), time="year"))
    assert user_ids(folder.parent / "graph", "author").tolist() == ["ann", "bob"]


def test_a_kill_at_the_very_end_leaves_nothing_that_another_call_takes_for_whole(folder: Path) -> None:
    while_work_is_removed(lambda: prepare(folder, "--time", "year"))
    check_equal(Graph.open(folder.parent / "graph"), Graph.from_pyg(by_hand(), time="year"))
    check_equal(prepare(folder, "--time", "year"), Graph.from_pyg(by_hand(), time="year"))
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, "graph"])


@pytest.mark.parametrize("as_data_set", [False, True])
def test_a_file_of_pyg_is_read_too(tmp_path: Path, as_data_set: bool) -> None:
    data, path = by_hand(), tmp_path / "data.pt"
    torch.save((data.to_dict(), None, HeteroData) if as_data_set else data, path)
    check_equal(prepare(path, "--time", "year"), Graph.from_pyg(data, time="year"))
    del data["paper"].y, data["paper", "cites", "paper"].y
    check_equal(prepare(path, "--drop", "y"), Graph.from_pyg(data))
    with pytest.raises(SystemExit, match="has no 'z' to drop"):
        prepare(path, "--drop", "z")
    with pytest.raises(SystemExit, match="--reverse, no --undirected"):
        prepare(path, "--undirected")


def test_labelled_nodes_are_dealt_and_columns_left_out(folder: Path) -> None:
    (folder / "nodes" / "paper.csv").write_text("id,label,words\n" + "".join(f"{i},{i % 2},1\n" for i in (10, 20, 30)))
    graph = prepare(folder, "--split", "0.4", "0.3", "0.3", "--drop", "words", "share")
    assert [graph.split(name).numel() for name in ("train", "val", "test")] == [1, 1, 1]
    assert "x" not in graph.types.node_arrays["paper"]
    assert graph.types.edge_arrays["author", "writes", "paper"] == {}


def test_parquet_and_archives_are_read_too(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = prepare(folder, "--time", "year")
    edges = folder / "edges" / f"{CITES}.csv"
    edges.unlink()
    columns = {"old": [30, 30, 20], "new": [20, 10, 10], "year": [2, 9, 3], "label": [1, 0, 1]}
    pq.write_table(pa.table(columns), edges.with_suffix(".parquet"))
    (folder / "nodes" / "venue" / "x.npy").unlink()
    (folder / "nodes" / "venue" / "num_nodes.npy").unlink()
    (folder / "nodes" / "venue").rmdir()
    np.savez(folder / "nodes" / "venue.npz", x=np.array([[1.0], [2.0]]))
    check_equal(prepare(folder, "--time", "year"), expected)


BAD: dict[str, tuple[tuple[str, str] | None, str, str]] = {
    "two tables of one type": (("nodes/paper.tsv", "id\n1\n"), "", "paper.tsv and .*paper.csv are two tables of"),
    "no such node": ((f"edges/{WRITES}.csv", "a,b\nann,11\n"), "", f"{WRITES}.csv: column 'b' holds '11' in row 1, "),
    "a name of two words": (("edges/writes__paper.csv", "a,b\n"), "", "is called <source type>__<name>__<dest"),
    "no table": (("nodes/readme.md", "x"), "", "readme.md is no table of one type: give a text"),
    "a missing time": (
        (f"edges/{CITES}.csv", "a,b,year\n10,20,1\n10,20,nan\n"),
        "--time year",
        "'nan' in row 2, .* a time",
    ),
    "times in two units": (
        (f"edges/{CITES}.csv", "a,b,year\n10,20,2024-01-01\n"),
        "--time year",
        r"Times of paper cites paper are dates.*; those of paper \(up to 3\) are numbers of another unit",
    ),
    "no such time": (None, "--time when", "time names the column 'when', and .* has these"),
    "words for arrays": ((ON, "a,b\n10,icml\n"), "", "'b' holds 'icml' in row 1, but there are 2 nodes of its type"),
    "beyond the arrays": ((ON, "a,b\n10,2\n"), "", "holds '2' in row 1, .* their ids are 0 to 1"),
    "no such type": (("edges/paper__to__c.csv", "a,b\n10,1\n"), "", r"the node type 'c', and .*nodes has \['author'"),
    "an id is missing": (
        ("nodes/author.tsv", "name\tage\nann\t3\nbob\t9\n\t3\n"),
        "",
        "'name' is empty in row 3, .* fill it",
    ),
    "a table of nodes apart": (None, "--nodes nodes.csv", r"their nodes are known \(no --nodes\)"),
    "reverse twice": (("edges/paper__rev_writes__author.csv", "a,b\n10,ann\n"), "--reverse", "rev_writes.*already"),
    "no labels": (("nodes/paper.csv", "id\n10\n20\n30\n"), "--split 1 0 0", "no node type has a label"),
}


@pytest.mark.parametrize(("file", "options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_right_is_refused(folder, file, options, message) -> None:
    for name, text in [file] if file else []:
        (folder / name).write_text(text)
    with pytest.raises(SystemExit, match=message) as stop:
        prepare(folder, *options.split())

    assert str(stop.value).startswith("lightning-gnn-dist prepare: ") and "\n" not in str(stop.value)
    assert not (folder.parent / "graph").exists()


def test_options_of_types_are_of_types(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("0,1\n1,0\n")
    with pytest.raises(SystemExit, match="--reverse is of graphs with types"):
        prepare(tmp_path / "edges.csv", "--reverse")
    for name in ("nodes", "edges"):
        (tmp_path / "tables" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no table"):
        prepare_graph(tmp_path / "tables", tmp_path / "out")
