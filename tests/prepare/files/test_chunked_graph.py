"""A chunked graph of DGL or GraphStorm becomes the graph from memory, in any format; wrong ones get one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.user_ids import nodes_with_ids, user_ids
from lightning_gnn_dist.prepare.files import number_tables as number_tables_module
from lightning_gnn_dist.prepare.files.chunked_graph import inputs_of_chunks
from lightning_gnn_dist.prepare.one_shard import OneShard
from lightning_gnn_dist.prepare.steps import journal as journal_module
from tests.graph.equal import check_equal
from tests.graph.typed.graphs import small
from tests.prepare.files.chunked import COMMAS, NUMPY, PARQUET, SPACES, write_chunks, write_graph

COUNTS = {"paper": [5, 0, 7], "author": [1, 6], "venue": [3]}


def graph_in_double() -> HeteroData:
    data = small()
    data["paper"].x = data["paper"].x.double()
    data["author"].x = data["author"].x.double()
    data["author", "writes", "paper"].edge_attr = data["author", "writes", "paper"].edge_attr.double()
    data["paper", "cites", "paper"].time += 0.5  # or a text would have whole numbers
    return data


@pytest.mark.parametrize(("edges", "arrays"), [(SPACES, NUMPY), (PARQUET, PARQUET), (COMMAS, COMMAS)])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_the_graph_from_memory(
    edges: dict[str, str], arrays: dict[str, str], reverse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_tables_module, "BYTES_AT_ONCE", 64)  # several pieces of each chunk
    data = graph_in_double()
    source = write_graph(tmp_path / "chunks", data, COUNTS, edges, arrays)
    prepare_graph(source, tmp_path / "graph", time="time", reverse=reverse, memory_bytes=2_000)
    for source_type, name, target in list(data.edge_types) if reverse else []:
        content = data[source_type, name, target].to_dict()
        flipped = content | {"edge_index": content["edge_index"].flip(0)}
        data[target, f"rev_{name}", source_type].update(flipped)
    check_equal(Graph.open(tmp_path / "graph"), Graph.from_pyg(data, time="time"))


def test_it_goes_on_after_any_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RECORD_SECONDS", 0.0)
    source, out = write_graph(tmp_path / "chunks", graph_in_double(), COUNTS, SPACES, PARQUET), tmp_path / "graph"
    kills, calls = 0, 0

    def killed(stage: str, share: float) -> None:
        nonlocal calls
        calls += 1
        if calls > kills:
            raise KeyboardInterrupt

    while not out.exists():
        kills, calls = kills + 3, 0
        try:
            prepare_graph(source, out, time="time", memory_bytes=2_000, on_progress=killed)
        except KeyboardInterrupt:
            assert not out.exists()
    check_equal(Graph.open(out), Graph.from_pyg(graph_in_double(), time="time"))


def test_shards_are_those_of_the_saved_graph_of_pyg(tmp_path: Path) -> None:
    torch.save(graph_in_double(), tmp_path / "data.pt")
    source = write_graph(tmp_path / "chunks", graph_in_double(), COUNTS, SPACES, NUMPY)
    for index in range(2):
        prepare_graph(tmp_path / "data.pt", tmp_path / "expected", shard=OneShard(index, 2))
        prepare_graph(source, tmp_path / "shards", shard=OneShard(index, 2))
    files = [file.relative_to(tmp_path / "expected") for file in (tmp_path / "expected").rglob("*.npy")]
    assert len(files) > 20
    for file in files:
        assert (tmp_path / "shards" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes(), file


def test_dgl_s_names_of_nothing_are_a_graph_without_types(tmp_path: Path) -> None:
    x, ends = torch.randn(5, 2, dtype=torch.float64), torch.tensor([[0, 1, 4, 4], [1, 2, 0, 0]])
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    said: dict[str, Any] = {
        "node_type": ["_N"],
        "num_nodes_per_chunk": [[3, 2]],
        "edge_type": ["_N:_E:_N"],
        "num_edges_per_chunk": [[2, 2]],
        "edges": {"_N:_E:_N": write_chunks(tmp_path / "c", "edges", ends.T.numpy(), [2, 2], SPACES)},
        "node_data": {"_N": {"feat": write_chunks(tmp_path / "c", "feat", x.numpy(), [3, 2], NUMPY)}},
        "edge_data": {"_N:_E:_N": {"weight": write_chunks(tmp_path / "c", "weight", weight.numpy(), [2, 2], NUMPY)}},
    }
    (tmp_path / "c" / "metadata.json").write_text(json.dumps(said))
    prepare_graph(tmp_path / "c", tmp_path / "graph")
    check_equal(Graph.open(tmp_path / "graph"), Graph.from_pyg(Data(x=x, edge_index=ends, edge_weight=weight)))
    with pytest.raises(SystemExit, match="leave the table of nodes"):
        main(["prepare", str(tmp_path / "c"), str(tmp_path / "other"), "--nodes", str(tmp_path)])
    assert inputs_of_chunks(tmp_path / "c", None, frozenset(), None).layout.startswith("a chunked graph of DGL or")


def test_graphstorm_s_labels_masks_and_ids(tmp_path: Path) -> None:
    folder = write_small(tmp_path / "storm")
    prepare_graph(folder, tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    assert graph.arrays["nodes/a/y"].tolist() == [1, -1, 0]
    assert graph.arrays["nodes/a/train_mask"].tolist() == [True, False, False]
    assert graph.arrays["nodes/a/val_mask"].dtype == torch.bool and "nodes/a/kind" not in graph.arrays
    assert user_ids(tmp_path / "graph", "a").tolist() == ["zed", "amy", "bob"]
    assert nodes_with_ids(tmp_path / "graph", ["bob", "zed"], "a").tolist() == [2, 0]
    assert user_ids(tmp_path / "graph", "b").tolist() == [700, 900]


A, E = "a", "a:to:b"
FILES = {
    "edges/0.csv": "0,1\n2,0\n",
    "edges/1.csv": "1,1\n",
    "feat/0.csv": "1,2\n3,4\n",
    "feat/1.csv": "5,6.5\n",
    "mask/0.csv": "1\n0\n",
    "mask/1.csv": "0\n",
}
COMMA = {"name": "csv", "delimiter": ","}
SAID: dict[str, Any] = {
    "graph_name": "storm",
    "node_type": ["a", "b"],
    "num_nodes_per_chunk": [[2, 1], [2, 0]],
    "edge_type": ["a:to:b"],
    "num_edges_per_chunk": [[2, 1]],
    "edges": {"a:to:b": {"format": COMMA, "data": ["edges/0.csv", "edges/1.csv"]}},
    "node_data": {
        "a": {
            "feat": {"format": COMMA, "data": ["feat/0.csv", "feat/1.csv"]},
            "train_mask": {"format": COMMA, "data": ["mask/0.csv", "mask/1.csv"]},
            "val_mask": {"format": COMMA, "data": ["mask/0.csv", "mask/1.csv"]},
            "kind": {"format": PARQUET, "data": ["kind/0.parquet", "kind/1.parquet"]},
        }
    },
    "edge_data": {},
    "raw_id_mappings": {
        "a": {"format": PARQUET, "data": ["ids/0.parquet", "ids/1.parquet"]},
        "b": {"format": PARQUET, "data": ["ids/b.parquet"]},
    },
    "graph_info": {"ntype_label": ["a"], "ntype_label_property": ["kind"]},
}


def write_small(folder: Path, said: dict[str, Any] | None = None, files: dict[str, Any] | None = None) -> Path:
    """Write a small folder of GraphStorm with some of it changed: None leaves a file out, a dictionary is Parquet."""
    tables: dict[str, Any] = {
        "kind/0.parquet": {"kind": pa.array([1, None], pa.int64())},
        "kind/1.parquet": {"kind": pa.array([0], pa.int64())},
        "ids/0.parquet": {"orig": ["bob", "zed"], "new": [2, 0]},
        "ids/1.parquet": {"orig": ["amy"], "new": [1]},
        "ids/b.parquet": {"orig": [900, 700], "new": [1, 0]},
    }
    content = FILES | tables | (files or {}) | {"metadata.json": json.dumps(SAID if said is None else said)}
    if files and "metadata.json" in files:
        content["metadata.json"] = files["metadata.json"]
    for name, held in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(held, str):
            (folder / name).write_text(held)
        elif isinstance(held, bytes):
            (folder / name).write_bytes(held)
        elif isinstance(held, np.ndarray):
            np.save(folder / name, held)
        elif held is not None:
            parquet.write_table(pa.table(held), folder / name)
    return folder


def said(**changes: Any) -> dict[str, Any]:
    return SAID | changes


def array(name: str, spec: Any) -> dict[str, Any]:
    """What is said with another array of nodes of type a."""
    return said(node_data={"a": {name: spec}})


def without(name: str) -> dict[str, Any]:
    return {word: value for word, value in SAID.items() if word != name}


N0 = {"format": NUMPY, "data": ["f0.npy", "f1.npy"]}
OF_KIND = {"format": PARQUET, "data": ["kind/0.parquet", "kind/1.parquet"]}
BAD: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    # What metadata.json says.
    (None, {"metadata.json": "{"}, "metadata.json is damaged"),
    (None, {"metadata.json": "[]"}, "metadata.json is damaged"),
    (without("node_type"), {}, "the entry 'node_type' is missing.*chunk_graph"),
    (without("edges"), {}, "the entry 'edges' is missing"),
    (without("num_nodes_per_chunk"), {}, "num_nodes_per_chunk has 0 lists"),
    (said(num_nodes_per_chunk=[[2, 1]]), {}, "names .*'a', 'b'.*num_nodes_per_chunk has 1 lists"),
    (said(num_nodes_per_chunk=[[2, 1], [2, -1]]), {}, "num_nodes_per_chunk must be a list of whole numbers"),
    (said(num_edges_per_chunk=[3]), {}, "num_edges_per_chunk must be a list of whole numbers"),
    (said(node_type=["a", "a"]), {}, "each type once"),
    (said(edge_type=["to"], edges={"to": SAID["edges"][E]}), {}, "'to' must be <source type>:<name>"),
    (said(edge_type=["a:to:c"], edges={"a:to:c": SAID["edges"][E]}), {}, "'a:to:c' names 'c', and node types are"),
    (said(edges={}), {}, "edges lack 'a:to:b'"),
    (said(edges=SAID["edges"] | {"b:by:a": {}}), {}, "edges is of 'b:by:a', and the types are"),
    (said(node_data={"c": {}}), {}, "node_data is of 'c', and the types are"),
    (said(node_data={"a": []}), {}, "node_data of 'a' must name arrays"),
    (said(node_data={"a": ["feat"]}), {}, "node_data of 'a' must name arrays with their files"),
    (array("feat", ["f.npy"]), {}, "'feat' must be .*\"data\": .files"),
    (array("feat", {"format": {"name": "hdf5"}, "data": ["f.h5"]}), {}, "one of .*numpy.*got .*hdf5"),
    (array("feat", {"data": ["f.npy"]}), {}, "the format must have a name"),
    (said(edges={E: {"format": NUMPY, "data": ["e.npy"]}}), {}, "the format must have a name, one of .*csv"),
    # Files that are not there, or of another length.
    (None, {"edges/1.csv": None}, "edges of 'a:to:b' names .*edges/1.csv, which is no file"),
    (None, {"feat/0.csv": None}, "'feat' names .*feat/0.csv, which is no file: names are those within"),
    (None, {"edges/1.csv": "1,1\n2,1\n"}, "edges/1.csv holds 2 rows, and metadata.json says 1"),
    (None, {"feat/1.csv": "1,1\n2,1\n"}, "feat/1.csv holds 2 rows, and metadata.json says 1"),
    (said(edges={E: {"format": COMMA, "data": ["edges/0.csv"]}}), {}, "names 1 files, and there are 2 chunks"),
    (array("feat", {"format": NUMPY, "data": ["f.npy"]}), {"f.npy": np.ones((4, 2))}, "hold 4 rows, .* says 3"),
    (array("feat", N0), {"f0.npy": np.ones((2, 2)), "f1.npy": np.ones((1, 3))}, "f1.npy holds rows of .*must be alike"),
    (
        array("feat", N0),
        {"f0.npy": b"\x93NUMPY\x01\x00", "f1.npy": np.ones((1, 3))},
        "f0.npy is no .npy file, or is trunc",
    ),
    (None, {"kind/1.parquet": b"PAR1 and more"}, "kind/1.parquet is no Parquet file, or is damaged"),
    (None, {"kind/1.parquet": {"kind": pa.array([], pa.int64())}}, "kind/1.parquet holds 0 rows|must be alike"),
    (None, {"edges/0.csv": ""}, "edges/0.csv is empty"),
    # What they hold.
    (None, {"edges/0.csv": "source,target\n0,1\n"}, "edges/0.csv begins with the line .*remove a heading"),
    (None, {"edges/0.csv": "0,1\n3,0\n"}, "edges/0.csv names the sender 3, but there are 3 nodes"),
    (None, {"edges/0.csv": "0,1\n2,2\n"}, "edges/0.csv names the receiver 2, but there are 2 nodes"),
    (None, {"edges/0.csv": "0,1\n-1,0\n"}, "edges/0.csv names the sender -1, but"),
    (None, {"edges/0.csv": "0,1\n2,zero\n"}, "edges/0.csv holds other things than numbers"),
    (None, {"edges/0.csv": "0,1\n2,0.5\n"}, "edges/0.csv holds other things than numbers"),
    (None, {"edges/0.csv": "0,1,7\n2,0,7\n"}, "edges/0.csv has 3 columns, and edges have two"),
    (None, {"mask/0.csv": "1\n2\n"}, "'train_mask' holds '2' in row 2, and a mask holds 0 and 1"),
    (None, {"feat/0.csv": "5,6\n7,many\n"}, "feat/0.csv holds words, and numbers are needed"),
    (None, {"feat/1.csv": "5,nan\n"}, "x .*(NaN|nan|finite)"),
    (None, {"kind/0.parquet": {"kind": ["one", "two"]}}, "kind/0.parquet: column 'kind' holds words|must be alike"),
    (array("feat", OF_KIND), {}, "kind/0.parquet: column 'kind' has no value in row 1"),
    (said(edges={E: {"format": {"name": "csv", "delimiter": "|"}, "data": ["edges/0.csv", "edges/1.csv"]}}), {}, "'|'"),
    (said(edges={E: {"format": PARQUET, "data": ["edges/0.csv", "edges/1.csv"]}}), {}, "is said to be Parquet"),
    (said(node_data={"a": {"label": OF_KIND, "kind": OF_KIND}}), {}, "holds two arrays for one purpose"),
    # Ids.
    (None, {"ids/0.parquet": {"id": ["bob", "zed"], "new": [2, 0]}}, "ids/0.parquet has the columns .*orig"),
    (None, {"ids/0.parquet": {"orig": ["bob", "zed"], "new": [2, 1]}}, "of 'a' must give each of the 3 nodes one id"),
    (None, {"ids/b.parquet": {"orig": [900], "new": [0]}}, "of 'b' must give each of the 2 nodes one id"),
]


@pytest.mark.parametrize(("told", "files", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_a_bad_folder_gets_one_sentence(
    told: dict[str, Any] | None, files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_small(tmp_path / "source", told, files)
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        prepare_graph(source, tmp_path / "graph")
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 700 and not (tmp_path / ".graph.preparing").exists()
