"""Everything that a graph can be read from gives the same graph, and says what is wrong with it."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import coalesce, to_undirected

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.graph.storage.npy import append
from lightning_gnn_dist.prepare.prepare_graph import Preparation
from lightning_gnn_dist.prepare.unpack import _check_largest
from tests.graph.equal import check_equal


def small() -> Data:
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randperm(36, generator=generator)[:15]  # distinct, in no order
    return Data(
        x=torch.rand(6, 3, generator=generator),
        y=torch.tensor([0, 1, 2, 0, 1, 2]),
        edge_index=torch.stack([pairs // 6, pairs % 6]),
        edge_weight=torch.rand(15, generator=generator),
        train_mask=torch.tensor([True, True, False, False, False, False]),
        val_mask=torch.tensor([False, False, True, True, False, False]),
        test_mask=torch.tensor([False, False, False, False, True, True]),
    )


def as_pyg(data: Data, folder: Path) -> dict[str, Any]:
    torch.save(data, folder / "data.pt")
    return {"source": folder / "data.pt"}


def as_data_set(data: Data, folder: Path) -> dict[str, Any]:
    torch.save((data.to_dict(), None, Data), folder / "data.pt")
    return {"source": folder / "data.pt"}


def ogb_arrays(data: Data) -> dict[str, np.ndarray[Any, Any]]:
    splits = {"train": data.train_mask, "valid": data.val_mask, "test": data.test_mask}
    lists = {f"{name}_idx": mask.nonzero().view(-1).numpy() for name, mask in splits.items()}
    arrays = {"edge_index": data.edge_index, "node_feat": data.x, "labels": data.y[:, None]}
    return {name: array.numpy() for name, array in (arrays | {"edge_weight": data.edge_weight}).items()} | lists


def as_archive(data: Data, folder: Path) -> dict[str, Any]:
    np.savez(folder / "data.npz", **ogb_arrays(data))
    return {"source": folder / "data.npz"}


def as_directory(data: Data, folder: Path) -> dict[str, Any]:
    (folder / "arrays").mkdir()
    for name, array in ogb_arrays(data).items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    return {"source": folder / "arrays"}


def as_tables(data: Data, folder: Path) -> dict[str, Any]:
    """Nodes have names, and stand in no order that edges would know."""
    pairs = zip(*data.edge_index.tolist(), data.edge_weight.tolist(), strict=True)
    edges = ["from,to,weight", *(f"n{a},n{b},{weight!r}" for a, b, weight in pairs)]
    splits = ["train", "train", "valid", "val", "test", "test"]
    rows = zip(range(6), data.x.tolist(), data.y.tolist(), splits, strict=True)
    nodes = ["a,b,c,id,label,split"]
    nodes += [f"{','.join(map(repr, x))},n{node},{'pqr'[y]},{split}" for node, x, y, split in rows]
    (folder / "edges.csv").write_text("\n".join(edges))
    (folder / "nodes.csv").write_text("\n".join(nodes))
    return {"source": folder / "edges.csv", "nodes": folder / "nodes.csv"}


EDGE, ONES = np.zeros((2, 1), int), np.ones(3, int)
FORMS = [as_pyg, as_data_set, as_archive, as_directory, as_tables]


def read(source: Path, **options: Any) -> Graph:
    out = source.parent / "out" if source.is_file() else source.with_name("out")
    prepare_graph(source, out, overwrite=True, **options)
    return Graph.open(out)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_graph(form: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    check_equal(read(**form(small(), tmp_path)), Graph.from_pyg(small()))


def test_arrays_of_bfloat16_stay_what_they_are(tmp_path: Path) -> None:
    data = small()
    data.x, data.edge_weight, data.z = data.x.bfloat16(), data.edge_weight.bfloat16(), torch.ones(6).bfloat16()
    where = as_pyg(data, tmp_path)
    check_equal(read(**where), Graph.from_pyg(data))
    data.x[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"x holds NaN or infinite values .*at node 3"):
        read(**as_pyg(data, tmp_path))


def edges_of(graph: Graph) -> tuple[Tensor, Tensor]:
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return torch.stack([graph.indices.long(), receiver]), graph.edge_arrays["edge_weight"]


def test_undirected_edges_go_both_ways_once(tmp_path: Path) -> None:
    data = small()
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :4]], dim=1)  # duplicates
    data.edge_weight = torch.cat([data.edge_weight, -torch.ones(4)])
    edge_index, weight = edges_of(read(**as_pyg(data, tmp_path), undirected=True))
    expected = to_undirected(data.edge_index)
    assert torch.equal(coalesce(edge_index), expected) and edge_index.shape == expected.shape
    weights = dict(zip(map(tuple, data.edge_index.t().tolist()), data.edge_weight.tolist(), strict=False))
    originals = dict(zip(map(tuple, small().edge_index.t().tolist()), small().edge_weight.tolist(), strict=True))
    assert weights.keys() == originals.keys()
    for pair, found in zip(map(tuple, edge_index.t().tolist()), weight.tolist(), strict=True):
        assert found == originals.get(pair, originals.get(pair[::-1]))  # its own; its reverse's if it had none


def test_a_split_is_dealt_among_labelled_nodes(tmp_path: Path) -> None:
    data = Data(y=torch.arange(100) % 5 - 1, edge_index=torch.tensor([[0], [1]]), num_nodes=100)
    where = as_pyg(data, tmp_path)
    graph, again, other = (read(**where, split=(0.5, 0.25, 0.25), seed=seed) for seed in (3, 3, 4))
    split = [graph.split(name) for name in ("train", "val", "test")]
    assert [nodes.numel() for nodes in split] == [40, 20, 20]
    assert torch.cat(split).sort().values.tolist() == (data.y >= 0).nonzero().view(-1).tolist()
    assert graph.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        ("a,b\nn1,n2\n", None, "'a' holds 'n1' in row 1, and nodes are numbered .* or the table of nodes"),
        ("a,b\n-1,2\n", None, "'a' holds '-1' in row 1, and nodes are numbered 0, 1, 2"),
        ("a\n1\n", None, "has one column, 'a', but an edge has two ends"),
        ("a,b\nn1,n9\n", "id,f\nn1,1\nn2,2\n", "'b' holds 'n9' in row 1, which no row of .*nodes.csv"),
        ("a,b\n1,2\n", "id,f\n1,1\n1,2\n", "lists node 1 twice"),
        ("a,b\n1,2\n", "id,f\n1,\n2,\n", r"'f' has no cell that is not empty: leave it out .--drop f"),
        ("a,b\n1,2\n", "id,split\n1,train\n2,dev\n", "'split' holds 'dev' in row 2, which is no split"),
        ("a,b,w\n1,2,inf\n", "id\n1\n2\n", "'w' holds 'inf' in row 1, which is no finite float32"),
        ("ann,bob\nbob,cat\n", "id,f\nann,1\nbob,1\ncat,1\n", "the first line names the nodes 'ann' and 'bob'"),
        ("0,1,road\n1,2,path\n", None, "first line '0,1,road', which is neither a heading.*nor a row"),
        ("a,b\n0,1\n# c,d\n", "id\n0\n1\n", "'a' holds '# c' in row 2, which no row"),
        ("a,b\n1_000,2\n", None, "'a' holds '1_000' in row 1, and nodes are numbered"),
        ("a,b\n0,1\n1,4000000000000\n", None, r"edges.csv names node 4000000000000 in row 2.*would take 96,000 GB"),
        ("a,b\n0,1\n", "id,y,label\n0,1,1\n1,1,1\n", "nodes.csv holds two arrays for one purpose, 'y' and 'label'"),
        ("a,b,index\n0,1,1\n", None, r"\['edge_index'\] are names that batches use"),
        ("a,b\n0,1\n", "id,train_mask\n0,1\n1,0.5\n", "'train_mask' holds '0.5' in row 2, and a mask holds 0 and 1"),
        (
            "a,b\n0,1\n",
            "id,y,split\n0,1,train\n1,,Train\n",
            "'split' holds 'Train' in row 2, where 'y' is empty, and a",
        ),
        ("a,b\n0,1\n", "id,f\n0,1\n1,16777217\n", "'f' holds '16777217' in row 2, which float32 rounds"),
        ("Source,source,target\n0,1,0\n", None, "two columns called 'source' and 'Source', which differ by case alone"),
        ("a,b\n0,1\n", "id,node,f\n0,1,1\n1,0,1\n", r"\['id', 'node'\], each of which may say what node"),
        ("a,b\n0,1\n", "id,label,f\n0,a,nan\n1,b,2\n", r"nodes\.csv: column 'f' holds 'nan' in row 1"),
        ("a,b,weight\n0,1,1.0\n1,2,nan\n", None, r"edges\.csv: column 'weight' holds 'nan' in row 2"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(edges: str, nodes: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text(edges)
    where: dict[str, Any] = {"source": tmp_path / "edges.csv"}
    if nodes is not None:
        (tmp_path / "nodes.csv").write_text(nodes)
        where["nodes"] = tmp_path / "nodes.csv"
    with pytest.raises(ValueError, match=message):
        read(**where)


def test_edges_are_looked_through_where_an_id_is_too_large_alone(tmp_path: Path) -> None:
    _check_largest(tmp_path / "edges.csv", tmp_path / "nowhere.npy", 9)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _check_largest(tmp_path / "edges.csv", tmp_path / "nowhere.npy", 4_000_000_000_000)


def array(values: Any, name: str = "t.npy") -> Callable[[Path], Path]:
    """A folder with edges and this beside them."""

    def write(folder: Path) -> Path:
        np.save(folder / "edge_index.npy", EDGE)
        np.save(folder / name, values)
        return folder

    return write


def text(content: bytes, name: str = "edges.csv") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def archive(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make(folder / "graph.npz")
        return folder / "graph.npz"

    return write


def in_two_places(folder: Path) -> Path:
    (folder / "x").mkdir()
    np.save(folder / "x" / "0.npy", np.ones((3, 1)))
    return array(np.ones((3, 1)), "x.npy")(folder)


def longer(folder: Path) -> Path:
    array(ONES, "y.npy")(folder)
    append(folder / "y.npy", ONES)
    return folder


NO_ARCHIVE = r"graph.npz (is no archive of arrays, or is damaged|holds no edge_index)"
UNREADABLE: list[tuple[Callable[[Path], Path], str]] = [
    (array(np.array(["a", "b"])), "t.npy holds <U1, which torch cannot compute with"),
    (array(np.array([None, 1])), "t.npy holds Python objects"),
    (array(np.array(["2020"], "datetime64[Y]")), r"t.npy holds datetime64\[Y\], which torch cannot compute with"),
    (array(np.ones(2, np.longdouble)), "t.npy holds float128, which torch cannot compute with"),
    (array(np.ones(2, ">f4")), "t.npy holds >f4, which torch cannot compute with"),
    (text("a,b\n0,1\n# \xe9,1\n".encode("latin-1")), "edges.csv is not in UTF-8"),
    (text("a,b\n0,1\n".encode("utf-16")), "edges.csv is not in UTF-8"),
    (text("a,b\n0,1\n".encode("utf-16-le")), "edges.csv is not in UTF-8"),
    (text(b"a,b\n0,1\n", "edges.csv.gz"), "edges.csv.gz is damaged or truncated"),
    (text(b"graph []", "graph.gml"), "holds no edges: give a"),
    (text(b"PK", "edges.csv.zip"), "holds no edges: give a"),
    (archive(lambda file: file.write_text("hello")), NO_ARCHIVE),
    (archive(lambda file: file.mkdir()), NO_ARCHIVE),
    (archive(lambda file: zipfile.ZipFile(file, "w").writestr("a.txt", "hi")), NO_ARCHIVE),
    (archive(lambda file: np.savez(file, edge_index=EDGE, x=np.array([None]))), NO_ARCHIVE),
    (in_two_places, "x is a folder, and an array in|x hold the same array"),
    (longer, "y.npy is longer than one"),
]


@pytest.mark.parametrize(("write", "message"), UNREADABLE)
def test_what_cannot_be_read_is_named(write: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "source"))


def test_a_pipe_is_no_table_and_several_spaces_are_one(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0  2\n2   1\n")
    assert read(tmp_path / "edges.txt").indices.tolist() == [2, 0]
    os.mkfifo(tmp_path / "nodes.csv")
    with pytest.raises(ValueError, match=r"nodes\.csv is a directory, a pipe or a device"):
        read(tmp_path / "edges.txt", nodes=tmp_path / "nodes.csv")


def test_shares_that_are_none_are_refused(tmp_path: Path) -> None:
    where = as_tables(small(), tmp_path)
    with pytest.raises(ValueError, match=r"The share 0.01 for val of 6 labelled nodes is none"):
        read(**where, drop=["split"], split=(0.5, 0.01, 0.2))
    with pytest.raises(ValueError, match=r"has \['test_mask', 'train_mask', 'val_mask'\] already"):
        read(**as_pyg(small(), tmp_path), split=(0.5, 0.2, 0.2))
    with pytest.raises(ValueError, match=r"three shares of at most 1 in all, got \[0.9, 0.2, 0.2\]"):
        read(**where, split=(0.9, 0.2, 0.2))


def test_comments_stand_at_the_top_alone_and_the_heading_is_told(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("# of SNAP\n# FromNodeId\tToNodeId\n0\t2\n2\t1\n")
    edges = tmp_path / "edges.txt"
    assert read(edges).indices.tolist() == [2, 0]
    said = Preparation(edges, tmp_path / "graph").plan.headings
    assert said == (f"{edges}: no heading, since the first line holds numbers alone.",)
    edges.write_text("# comment\nfrom\tto\n0\t2\n")
    said = Preparation(edges, tmp_path / "graph").plan.headings
    assert said == (f"{edges}: line 2 is taken as heading: from, to.",)


def test_columns_and_arrays_can_be_left_out(tmp_path: Path) -> None:
    where = as_tables(small(), tmp_path)
    graph = read(**where, drop=["b", "split", "weight"])
    assert graph.node_arrays.keys() == {"x", "y"} and graph.node_arrays["x"].shape == (6, 2) and not graph.edge_arrays
    for form in (as_pyg, as_archive):
        name = "x" if form is as_pyg else "node_feat"
        assert "x" not in read(**form(small(), tmp_path), drop=[name]).node_arrays
    for name in ("from", "id"):  # which name nodes
        with pytest.raises(ValueError, match=f"has no '{name}' to drop"):
            read(**where, drop=[name])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_to_be_left_out_must_be_there(form: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no 'colour' to drop, but"):
        read(**form(small(), tmp_path), drop=["colour"])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 1))}, "holds no edge_index"),
        ({"edge_index": np.zeros((2, 1), int), "num_nodes": np.array(3), "train_idx": np.array([3])}, "got 3 to 3"),
        ({"edge_index": np.zeros((2, 1), int), "y": np.zeros(3, int), "labels": np.zeros(3, int)}, "for one purpose"),
        ({"edge_index": np.zeros((3, 3), int), "num_nodes": np.array(3)}, r"must hold integers of shape \(2, E\)"),
        ({"edge_index": np.array([[0], [3]]), "num_nodes": np.array(3)}, "names the receiver 3"),
        ({"edge_index": EDGE, "num_nodes": np.array([3, 4])}, r"num_nodes must hold one whole number, got int64 of sh"),
        ({"edge_index": EDGE, "num_nodes": np.array(0)}, "num_nodes says 0 nodes, and a graph has at least 1"),
        ({"edge_index": EDGE, "num_nodes": np.array(2**45)}, "num_nodes says 35,184,372,088,832 nodes.*would take"),
        ({"edge_index": EDGE, "y": ONES, "train_idx": ONES, "train_mask": ONES > 0}, "'train_(idx|mask)' and 'train_"),
        ({"edge_index": EDGE, "y": ONES, "train_idx": np.array([1, 0, 1])}, "train_idx lists 3 nodes and names 2"),
        ({"edge_index": EDGE, "y": ONES, "n_id": ONES}, r"\['n_id'\] are names that batches use"),
        ({"edge_index": EDGE, "y": ONES, "edge_weight": np.array([np.inf])}, "edge_weight holds NaN or .* at edge 0"),
    ],
)
def test_what_is_wrong_with_arrays_is_named(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "data.npz")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save(np.random.default_rng, tmp_path / "data.pt")
    with pytest.raises(ValueError, match=r"without running code out of it.*weights_only=False"):
        read(tmp_path / "data.pt")
    torch.save({"x": 1}, tmp_path / "data.pt")
    with pytest.raises(TypeError, match="holds a dict"):
        read(tmp_path / "data.pt")
    torch.save((small().to_dict(), {"x": torch.arange(3)}, Data), tmp_path / "data.pt")
    with pytest.raises(ValueError, match=r"several graphs: save the one you want, dataset\[0\]"):
        read(tmp_path / "data.pt")


def test_a_file_of_pyg_needs_no_table_of_nodes(tmp_path: Path) -> None:
    where = as_tables(small(), tmp_path) | as_pyg(small(), tmp_path)
    with pytest.raises(ValueError, match=r"holds nodes as well as edges: leave the table of nodes \(.*\) out"):
        read(**where)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read(tmp_path / "nowhere")
