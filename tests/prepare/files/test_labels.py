"""An empty cell is no label, in every kind of table; -1 among words, which would become a class, is refused."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main

KINDS = ["csv", "parquet", "typed csv", "typed parquet"]
WORDS, WHOLE, FRACTIONS = ["gold", None, "silver", "gold", ""], [10, None, 2, 10, None], [1.5, None, 2.5, 3.5, None]


def source(kind: str, labels: Sequence[object], folder: Path) -> tuple[Path, Path | None]:
    """A table of five nodes and one of edges, of one type or of one with a name; for ``prepare`` and its ``nodes``."""
    tables = {"nodes": {"id": list("ABCDE"), "a": [1.0] * 5, "label": labels}}
    tables["edges"] = {"source": list("ABCD"), "target": list("BCDE")}
    is_typed, suffix = kind.startswith("typed"), ".csv" if kind.endswith("csv") else ".parquet"
    names = {"nodes": "nodes/paper", "edges": "edges/paper__cites__paper"} if is_typed else {n: n for n in tables}
    for table, columns in tables.items():
        path = folder / f"{names[table]}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".csv":
            rows = [columns, *zip(*columns.values(), strict=True)]
            path.write_text("".join(",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows))
        else:
            parquet.write_table(pa.table(columns), path)
    return (folder, None) if is_typed else (folder / f"edges{suffix}", folder / f"nodes{suffix}")


def arrays(folder: Path) -> dict[str, list[float]]:
    of_types = Graph.open(folder).types.node_arrays
    return {name: array.tolist() for name, array in next(iter(of_types.values())).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "y"),
    [(WORDS, [0, -1, 1, 0, -1]), (WHOLE, [10, -1, 2, 10, -1]), ([10.0, None, 2.0, 10.0, None], [10, -1, 2, 10, -1])],
    ids=["words", "whole", "as pandas writes them"],
)
def test_an_empty_cell_is_no_label(kind: str, labels: Sequence[object], y: list[int], tmp_path: Path) -> None:
    table, nodes = source(kind, labels, tmp_path / "tables")
    options = [] if nodes is None else ["--nodes", str(nodes)]
    main(["prepare", str(table), str(tmp_path / "graph"), *options, "--split", "0.34", "0.33", "0.33"])
    found = arrays(tmp_path / "graph")
    assert found["y"] == y
    marked = [sum(found[f"{split}_mask"][node] for split in ("train", "val", "test")) for node in range(5)]
    assert marked == [1, 0, 1, 1, 0]  # those that have a label


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_target_is_none(kind: str, tmp_path: Path) -> None:
    table, nodes = source(kind, FRACTIONS, tmp_path / "tables")
    prepare_graph(table, tmp_path / "graph", nodes=nodes, float_labels=True)
    y = arrays(tmp_path / "graph")["y"]
    assert [None if value != value else value for value in y] == FRACTIONS


@pytest.mark.parametrize("kind", KINDS)
def test_minus_one_among_words_is_refused(kind: str, tmp_path: Path) -> None:
    table, nodes = source(kind, ["gold", "-1", "silver", "gold", "gold"], tmp_path / "tables")
    with pytest.raises(ValueError, match=r"column 'label' holds -1 among words: .* an empty cell is no label\.$"):
        prepare_graph(table, tmp_path / "graph", nodes=nodes)


@pytest.mark.parametrize("kind", ["csv", "typed csv"])
@pytest.mark.parametrize(
    ("labels", "y"),
    [(("good", "", "bad"), [1, -1, 0]), (("7", "", "0"), [7, -1, 0]), (("7.5", "", "0"), [7.5, None, 0])],
)
def test_labels_of_edges_may_be_empty(kind: str, labels: Sequence[str], y: list[float], tmp_path: Path) -> None:
    table, nodes = source(kind, WHOLE, tmp_path / "tables")
    edges = table if nodes else table / "edges" / "paper__cites__paper.csv"
    edges.write_text("source,target,label\nA,B,{}\nB,C,{}\nC,D,{}\n".format(*labels))
    prepare_graph(table, tmp_path / "graph", nodes=nodes)
    (found,) = Graph.open(tmp_path / "graph").types.edge_arrays.values()
    assert [None if each != each else each for each in found["edge_y" if nodes else "y"].tolist()] == y


def test_edges_to_train_on_may_have_no_label(tmp_path: Path) -> None:
    table, _ = source("typed csv", WHOLE, tmp_path / "tables")
    edges = "source,target,label,split\nA,B,7,train\nB,C,,train\nC,D,0,val\n"
    (table / "edges" / "paper__cites__paper.csv").write_text(edges)
    prepare_graph(table, tmp_path / "graph")
    (found,) = Graph.open(tmp_path / "graph").types.edge_arrays.values()
    assert found["y"].tolist() == [7, -1, 0]


@pytest.mark.parametrize("kind", ["csv", "typed csv"])
def test_infinite_labels_of_edges_are_refused(kind: str, tmp_path: Path) -> None:
    table, nodes = source(kind, WHOLE, tmp_path / "tables")
    edges = table if nodes else table / "edges" / "paper__cites__paper.csv"
    edges.write_text("source,target,label\nA,B,1.5\nB,C,inf\nC,D,\n")
    with pytest.raises(ValueError, match=r"y holds NaN or infinite values \(the first at edge 1\)"):
        prepare_graph(table, tmp_path / "graph", nodes=nodes)


def test_a_target_to_train_on_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("a,b\n0,1\n")
    (tmp_path / "nodes.csv").write_text("id,f,label,split\n0,1,1.5,train\n1,2,,train\n")
    nodes = tmp_path / "nodes.csv"
    with pytest.raises(ValueError, match=r"classes are integers: .* If the task is regression, .*--float-labels"):
        prepare_graph(tmp_path / "edges.csv", tmp_path / "graph", nodes=nodes)
    prepare_graph(tmp_path / "edges.csv", tmp_path / "graph", nodes=nodes, float_labels=True)
    assert arrays(tmp_path / "graph")["train_mask"] == [True, False]


def test_numbers_in_words_of_parquet_stay_words(tmp_path: Path) -> None:
    table, nodes = source("parquet", ["10", "2", None, "2", "10"], tmp_path / "tables")
    prepare_graph(table, tmp_path / "graph", nodes=nodes)
    assert arrays(tmp_path / "graph")["y"] == [0, 1, -1, 1, 0]
