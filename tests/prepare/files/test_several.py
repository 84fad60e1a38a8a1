"""A table in several files: a folder, a pattern, or a list of names, of any kind that is read."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.prepare.prepare_graph import Portion

ROWS = [(n, (n * 7 + 1) % 50, n / 4) for n in range(50)] * 3
HEADS = ("source", "target", "weight")


def write(path: Path, rows: Sequence[tuple[float, ...]], heads: Sequence[str] = HEADS) -> Path:
    text = "".join(",".join(map(str, row)) + "\n" for row in [heads, *rows]).encode()
    name = path.name.lower()
    if name.endswith(".parquet"):
        pq.write_table(pa.table({name: [row[at] for row in rows] for at, name in enumerate(heads)}), path)
        return path
    if ".jsonl" in name:
        text = "".join(json.dumps(dict(zip(heads, row, strict=True))) + "\n" for row in rows).encode()
    if name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text)
    else:
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def same(one: Path, other: Path) -> bool:
    graphs = [Graph.open(path) for path in (one, other)]
    weights = [graph.edge_arrays["edge_weight"] for graph in graphs]
    return weights[0].equal(weights[1]) and graphs[0].fingerprint == graphs[1].fingerprint


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    prepare_graph(write(tmp_path / "all.csv", ROWS), tmp_path / "whole")
    return tmp_path / "whole"


KINDS = ["csv", "csv.gz", "csv.zst", "parquet", "jsonl", "jsonl.gz", "jsonl.zst", "CSV.GZ", "JSONL.ZST"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_names_files_of_every_kind(kind: str, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "edges").mkdir()
    for at in range(3):
        write(tmp_path / "edges" / f"part{at}.{kind}", ROWS[at * 50 : at * 50 + 50])
    (tmp_path / "edges" / "README.md").write_text("not a part\n")
    prepare_graph(tmp_path / "edges" / f"*.{kind}", tmp_path / "graph")
    assert same(tmp_path / "graph", whole)


def test_files_are_named_one_after_the_other(whole: Path, tmp_path: Path) -> None:
    parts = [write(tmp_path / f"{name}.csv", ROWS[at * 50 : at * 50 + 50]) for at, name in enumerate("zxy")]
    main(["prepare", *map(str, parts), str(tmp_path / "graph")])
    assert same(tmp_path / "graph", whole)
    prepare_graph(parts, tmp_path / "again")
    assert same(tmp_path / "again", whole)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_nodes_may_be_in_several_texts_with_columns_in_another_order(tmp_path: Path) -> None:
    for at in range(2):
        rows = [(f"n{n}", n / 8, ("red", "blue")[n % 2]) for n in range(at * 25, at * 25 + 25)]
        turn = [(color, name, size) for name, size, color in rows]
        heads = ("id", "size", "color")
        write(tmp_path / f"n{at}.csv", turn if at else rows, [heads[2], *heads[:2]] if at else heads)
    edges = write(tmp_path / "edges.csv", [(f"n{a}", f"n{b}") for a, b, _ in ROWS], HEADS[:2])
    prepare_graph(edges, tmp_path / "graph", nodes=tmp_path / "n?.csv")
    graph = Graph.open(tmp_path / "graph")
    assert graph.node_arrays["x"][:, 0].tolist() == (np.arange(50) / 8).tolist()
    assert graph.node_arrays["categories"][:, 0].tolist() == [2 - n % 2 for n in range(50)]


def test_words_in_a_part_of_the_edges_are_categories_of_all(tmp_path: Path) -> None:
    write(tmp_path / "e0.csv", [(0, 1, "a"), (1, 2, "b")])
    write(tmp_path / "e1.csv", [(2, 0, "b")])
    prepare_graph(tmp_path / "e*.csv", tmp_path / "graph")
    assert sorted(Graph.open(tmp_path / "graph").edge_arrays["edge_weight"].tolist()) == [1, 2, 2]


def test_a_shard_is_made_of_what_all_hosts_find_alike(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"{name}.csv", ROWS[:50]) for name in "ab"]
    shard = type("Shard", (Portion,), {"is_whole": False})()
    for source in (parts, "sqlite:///shop.db"):
        with pytest.raises(ValueError, match=r"name several by a pattern, .* of a database prepare all, and divide it"):
            prepare_graph(source, tmp_path / "graph", shard=shard)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_an_error_names_the_file_and_its_row(kind: str, tmp_path: Path) -> None:
    for at in range(3):
        rows = [(n, 0, "7" if n != 5 or at != 1 else "seven") for n in range(30)]
        write(tmp_path / f"e{at}.{kind}", rows)
    with pytest.raises(ValueError, match=rf"column 'weight' holds 'seven' in row 6 of .*e1.{kind}, which is no number"):
        prepare_graph(tmp_path / f"e*.{kind}", tmp_path / "graph")
    with pytest.raises(ValueError, match=rf"^the files of source: .* row 6 of {tmp_path}/e1.{kind}, which is no"):
        prepare_graph([tmp_path / f"e{at}.{kind}" for at in range(3)], tmp_path / "graph")


def test_what_a_pattern_names_is_checked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\*.csv names no file"):
        prepare_graph(tmp_path / "*.csv", tmp_path / "graph")
    write(tmp_path / "a.csv", [(0, 1, 2)])
    with pytest.raises(
        FileNotFoundError, match=r"source must be a list of files that are there, and .*/no.csv is none"
    ):
        prepare_graph([tmp_path / "a.csv", tmp_path / "no.csv"], tmp_path / "graph")
    for at, name in enumerate(("0.parquet", "1.csv")):
        (tmp_path / "mixed").mkdir(exist_ok=True)
        write(tmp_path / "mixed" / name, [(at, 1, 2)])
    with pytest.raises(ValueError, match=r"mixed holds no edges: .* a folder of such files of one kind"):
        prepare_graph(tmp_path / "mixed", tmp_path / "graph")
    (tmp_path / "w.jsonl").write_text('{"source": 0, "target": 1, "w": 1, "W": 2}\n')
    with pytest.raises(ValueError, match=r"two columns called '[wW]' and '[wW]', which differ by case alone"):
        prepare_graph(tmp_path / "w.jsonl", tmp_path / "graph")
    write(tmp_path / "b.csv", [(0, 1, 2), (1, 1)])
    with pytest.raises(ValueError, match=r"b.csv, line 3: 2 cells, but there are 3 columns"):
        prepare_graph(tmp_path / "?.csv", tmp_path / "graph")
    write(tmp_path / "b.csv", [(0, 1)], HEADS[:2])
    with pytest.raises(ValueError, match=r"b.csv has the columns .* files of one table are alike"):
        prepare_graph(tmp_path / "?.csv", tmp_path / "graph")
