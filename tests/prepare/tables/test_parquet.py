"""Parquet: the graphs that CSV gives, in memory and on disk, and what is wrong in which column."""

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import prepare_graph
from lightning_gnn_dist.graph.user_ids import class_names, user_ids
from lightning_gnn_dist.prepare.engine import Work, duckdb_for
from lightning_gnn_dist.prepare.reading import is_parquet, load
from tests.prepare.test_prepare_graph import content, prepared

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
NUM_NODES, NUM_EDGES = 60, 500


def edges() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, NUM_NODES, (2, NUM_EDGES))
    pairs[0, 0] = NUM_NODES - 1
    return {"source": pairs[0], "target": pairs[1], "weight": generator.integers(1, 9, NUM_EDGES) / 4}


def nodes() -> dict[str, Any]:
    generator = np.random.default_rng(1)
    splits = generator.choice(["train", "val", "test", ""], NUM_NODES)
    return {
        "id": np.arange(NUM_NODES),
        "label": generator.integers(0, 5, NUM_NODES),
        "split": splits,
        **{f"f{place}": generator.integers(-8, 8, NUM_NODES) / 8 for place in range(3)},
    }


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def write_text(path: Path, columns: dict[str, Any]) -> Path:
    rows = zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]))
    return path


def write_several(folder: Path, columns: dict[str, Any]) -> Path:
    """A folder as other programs leave it."""
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    size = len(next(iter(columns.values())))
    for number, start in enumerate(range(0, size, 37)):
        rows = {name: column[start : start + 37] for name, column in columns.items()}
        write(folder / f"part-{number:05}.snappy.parquet", rows, row_group_size=10)
    return folder


@pytest.fixture(params=["one file", "several"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    form = write_several if request.param == "several" else write
    suffix = "" if request.param == "several" else ".parquet"
    return {"source": form(tmp_path / f"edges{suffix}", edges()), "nodes": form(tmp_path / f"nodes{suffix}", nodes())}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    return {"source": write_text(tmp_path / "edges.csv", edges()), "nodes": write_text(tmp_path / "nodes.csv", nodes())}


def saved(out: Path, **where: Any) -> dict[str, bytes]:
    prepare_graph(out=out, **where)
    return content(out)


@pytest.mark.parametrize("undirected", [False, True])
def test_it_gives_the_graph_that_text_gives(undirected, tables, texts, tmp_path) -> None:
    expected = saved(tmp_path / "expected", **texts, undirected=undirected)
    assert {"x.npy", "y.npy", "train_mask.npy", "edge_weight.npy"} <= {Path(name).name for name in expected}
    assert saved(tmp_path / "graph", **tables, undirected=undirected, memory_bytes=20_000) == expected
    assert not list(tmp_path.glob(".*"))


def test_edges_alone_and_beside_arrays_are_sorted_on_disk(tmp_path: Path) -> None:
    pairs = {name: column for name, column in edges().items() if name != "weight"}
    (tmp_path / "source").mkdir()
    write_several(tmp_path / "source" / "edge_index", pairs)
    np.save(tmp_path / "source" / "x.npy", np.ones((NUM_NODES, 2), np.float32))
    graph = prepared(tmp_path / "source", tmp_path / "graph", memory_bytes=5000)
    alone = prepared(tmp_path / "source" / "edge_index", tmp_path / "alone", memory_bytes=5000)
    assert torch.equal(graph.indices, alone.indices) and torch.equal(graph.indptr, alone.indptr)
    assert graph.node_arrays["x"].shape == (NUM_NODES, 2)


def test_ends_are_found_by_name_and_else_are_the_first_two(tmp_path: Path) -> None:
    table = {"weight": [0.5, 1.0], "dst": [1, 2], "Src": [0, 1]}
    for path in (write(tmp_path / "e.parquet", table), write_text(tmp_path / "e.csv", table)):
        graph = prepared(path, tmp_path / f"{path.suffix}")
        assert graph.indices.tolist() == [0, 1] and graph.edge_arrays["edge_weight"].tolist() == [0.5, 1.0]
    other = prepared(write(tmp_path / "o.parquet", {"a": [0], "b": [1], "c": [2.0]}), tmp_path / "other")
    assert other.indptr.tolist() == [0, 0, 1]


def test_words_lists_and_other_kinds_are_read(tmp_path: Path) -> None:
    words = pa.array(["ann", "bob"]).dictionary_encode()
    lists = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32()))
    table = {
        "name": words,
        "embedding": lists,
        "is_new": [True, False],
        "split": pa.array(["train", None]),
        "y": pa.array([1, 0], pa.uint8()),
    }
    path = write(tmp_path / "nodes.parquet", table)
    pairs = write(tmp_path / "edges.parquet", {"from": ["bob"], "to": ["ann"]})
    graph = prepared(pairs, tmp_path / "graph", nodes=path)
    assert graph.node_arrays["x"].tolist() == [[1, 2, 1], [3, 4, 0]] and graph.node_arrays["y"].tolist() == [1, 0]
    assert graph.indices.tolist() == [1] and graph.split("train").tolist() == [0]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 2], [0.5, 1.7], [1, 2, 0.5, 1.7]), ([1, 2], ["7", "q"], None), ([None, None], ["s", "t"], None)],
)
def test_files_of_one_table_may_differ_in_types(first: Any, second: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    write(tmp_path / "n" / "1.parquet", {"id": ["a", "b"], "y": pa.array(first)})
    write(tmp_path / "n" / "2.parquet", {"id": ["c", "d"], "y": second})
    pairs = write(tmp_path / "e.parquet", {"source": ["a"], "target": ["d"]})
    options = {"nodes": tmp_path / "n", "float_labels": expected is not None}
    y = prepared(pairs, tmp_path / "graph", **options).node_arrays["y"].tolist()
    words = [str(word) for word in [*first, *second] if word is not None]
    if expected is None:
        assert [class_names(tmp_path / "graph")[at] for at in y if at >= 0] == words
    else:
        assert y == expected


def test_the_index_of_pandas_is_no_column(tmp_path: Path) -> None:
    path = write(tmp_path / "e.parquet", {"__index_level_0__": [7], "a": [0], "b": [1]})
    assert prepared(path, tmp_path / "graph").indptr.tolist() == [0, 0, 1]


def test_ids_that_pandas_has_made_fractions_are_whole_numbers(tmp_path: Path) -> None:
    nodes = write(tmp_path / "n.parquet", {"id": [7.0, 8.0, 9.0], "f": [1.0, 2.0, 3.0]})
    pairs = write(tmp_path / "e.parquet", {"source": [7.0, 9.0], "target": [8, 8]})
    assert prepared(pairs, tmp_path / "graph", nodes=nodes).indices.tolist() == [0, 2]
    assert user_ids(tmp_path / "graph").tolist() == [7, 8, 9]


def test_ids_of_64_bits_without_a_sign_are_words(tmp_path: Path) -> None:
    ids = [2**63 + 5, 3, 2**64 - 1]
    path = write(tmp_path / "n.parquet", {"id": pa.array(ids, pa.uint64()), "f": [0.0, 1.0, 2.0]})
    pairs = write(
        tmp_path / "e.parquet", {"source": pa.array(ids[:2], pa.uint64()), "target": pa.array([3, ids[2]], pa.uint64())}
    )
    text = write_text(
        tmp_path / "e.csv", {"source": np.array(ids[:2], np.uint64), "target": np.array([3, ids[2]], np.uint64)}
    )
    for at, source in enumerate((pairs, text)):
        graph = prepared(source, tmp_path / f"graph{at}", nodes=path)
        assert graph.indices.tolist() == [0, 1] and graph.indptr.tolist() == [0, 0, 1, 2]
        assert user_ids(tmp_path / f"graph{at}").tolist() == [str(each) for each in ids]


def test_a_column_may_be_called_as_those_of_duckdb_and_ours(tmp_path: Path) -> None:
    names = ("file_row_number", "filename", " row", "key0", "n0", "k")
    columns = {name: [2.0, 1.0, 0.0] for name in names}
    path = write(tmp_path / "n.parquet", {"id": ["a", "b", "c"], **columns}, row_group_size=2)
    pairs = write(tmp_path / "e.parquet", {"source": ["a", "b", "c"], "target": ["c", "a", "b"], **columns})
    graph = prepared(pairs, tmp_path / "graph", nodes=path)
    assert graph.node_arrays["x"].tolist() == [[2.0] * len(names), [1.0] * len(names), [0.0] * len(names)]
    assert graph.indices.tolist() == [1, 2, 0] and graph.edge_arrays["edge_file_row_number"].tolist() == [1.0, 0.0, 2.0]


def table(columns: dict[str, Any], name: str = "e.parquet") -> Callable[[Path], object]:
    return lambda folder: write(folder / name, columns)


def truncated(folder: Path) -> None:
    path = write(folder / "e.parquet", edges())
    path.write_bytes(path.read_bytes()[:-9])


def damaged_pages(folder: Path) -> None:
    path = write(folder / "e.parquet", edges(), compression="snappy")
    whole = bytearray(path.read_bytes())
    whole[4:300] = b"\xff" * 296
    path.write_bytes(whole)


def unlike(folder: Path) -> None:
    write(folder / "a.parquet", {"source": [0], "target": [1]})
    write(folder / "b.parquet", {"source": [0], "target": [1], "weight": [1.0]})


def of_other_types(folder: Path) -> None:
    write(folder / "a.parquet", {"source": [0], "target": [1]})
    write(folder / "b.parquet", {"source": [0], "target": [b"1"]})


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (table({"source": [0.0, 1.5], "target": [1, 2]}), "'source' holds '1.5' in row 2, and keys are whole numbers or"),
    (table({"source": [0, 1, 5], "target": pa.array([1, 2, None])}), "'target' is empty in row 3, .*remove the row"),
    (table({"weight": [1.0], "kind": [2], "source": [0]}), "'source' and none that goes with it.*source and target"),
    (lambda folder: (folder / "e.parquet").write_text("0,1\n"), "e.parquet is no table, or is damaged"),
    (truncated, "e.parquet is no table, or is damaged"),
    (damaged_pages, "e is no table, or is damaged"),
    (of_other_types, r"b.parquet: column 'target' holds BLOB, but BIGINT in the files before, such as .*a.parquet"),
    (unlike, r"b.parquet has the columns \[.*'weight'\].*alike"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_what_is_wrong_is_named(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    damage(tmp_path / "e")
    with pytest.raises(ValueError, match=message):
        prepare_graph(tmp_path / "e", tmp_path / "graph")
    assert not (tmp_path / "graph").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f0": pa.array([float("nan")] + [1.0] * (NUM_NODES - 1))}, r"'f0' holds 'nan' in row 1.*--drop f0"),
        ({"f0": pa.array([[1.0]] * (NUM_NODES - 1) + [[1.0, 2.0]])}, "lists of unequal length"),
        (
            {"label": pa.array([[1, 0]] * (NUM_NODES - 1) + [None])},
            "'label' is empty in row 60, and each row has a list",
        ),
        (
            {"label": pa.array([[1, 0]] * (NUM_NODES - 1) + [[None, 1]])},
            r"'label' holds '\[NULL, 1\]' in row 60, and each",
        ),
        ({"f0": pa.array([{"a": 1}] * NUM_NODES)}, r"^[^\n]*'f0' holds STRUCT.*, of which no number"),
        (
            {"f0": pa.array([["w"], ["v", "w"]] * (NUM_NODES // 2))},
            r"^[^\n]*'f0' holds VARCHAR\[\], of which no number",
        ),
        ({"f0": pa.array([2**63 + 1] * NUM_NODES, pa.uint64())}, "'f0' holds '9223372036854775809' .* float32 rounds"),
        ({"label": pa.array([2**63 + 1] * NUM_NODES, pa.uint64())}, "y holds one torch.float64 per node"),
    ],
)
def test_what_is_wrong_with_nodes_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    pairs = write(tmp_path / "edges.parquet", edges())
    table = write(tmp_path / "nodes.parquet", nodes() | change)
    with pytest.raises(ValueError, match=message):
        prepare_graph(pairs, tmp_path / "graph", nodes=table)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "edges.parquet", edges())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    duckdb_for.cache_clear()
    assert is_parquet(path)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lightning-gnn-dist\[tables\]"'):
        prepare_graph(path, tmp_path / "graph")


def test_a_large_row_group_is_not_held(tmp_path: Path) -> None:
    many = np.random.default_rng(0).integers(0, 1000, (2, 2_000_000))
    path = write(tmp_path / "e.parquet", {"source": many[0], "target": many[1]}, row_group_size=2_000_000)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = 0
    with Work(tmp_path / "work", 10**8) as work:
        table = load(work, "edges", path)
        for _ in work.stream(f"SELECT source, target FROM {table.name}", table):
            most = max(most, pa.total_allocated_bytes() - before)
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most + python < many.nbytes / 3
