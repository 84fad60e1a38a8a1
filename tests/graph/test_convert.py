"""From PyG: what travels along, and what is refused with the way out."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.graph.convert import RESERVED

Arrays: TypeAlias = dict[str, Tensor]


def small(**changes: Any) -> Data:
    arrays = {
        "x": torch.randn(4, 2),
        "y": torch.tensor([0, 1, 1, 0]),
        "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]),
        "train_mask": torch.tensor([True, True, False, False]),
    }
    return Data(**(arrays | changes))


def test_as_many_edges_as_nodes_is_not_confusing() -> None:
    data = small(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), edge_type=torch.tensor([5, 6, 7, 8]))
    graph = Graph.from_pyg(data)
    assert set(graph.edge_arrays) == {"edge_type"}
    assert graph.edge_arrays["edge_type"].tolist() == [8, 5, 6, 7]


def test_it_goes_back_to_pyg() -> None:
    data = small(edge_attr=torch.tensor([[1.0], [2.0], [3.0]]))
    found = Graph.from_pyg(data, edge_ids=True).to_pyg()
    assert isinstance(found, Data) and found.num_nodes == 4
    assert torch.equal(found.edge_index, data.edge_index[:, found.e_id])
    assert torch.equal(found.edge_attr, data.edge_attr[found.e_id]) and torch.equal(found.x, data.x)
    bare = Graph.from_edge_index(torch.tensor([[0], [1]]), 7).to_pyg()
    assert bare.num_nodes == 7 and bare.edge_index.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"edge_index": torch.tensor([[0], [4]])},
            "names the receiver 4, but there are 4 nodes: their ids count from 0",
        ),
        ({"edge_index": torch.tensor([[-1], [2]])}, "names the sender -1"),
        ({"edge_index": torch.tensor([[0.0], [2.0]])}, "must be integers"),
        ({"edge_index": None}, "no edge_index"),
        ({"y": torch.zeros(3)}, r"y has shape \(3,\), but the graph has 4 nodes: .* of edges has a name that"),
        ({"y": torch.zeros(4)}, r"data\.y\.long\(\).*float_labels=True"),
        ({"y": torch.tensor([-1, 0, 0, -1])}, "train_mask marks 1 nodes whose label is negative"),
        ({"train_mask": torch.tensor([1, 0, 0, 0])}, "train_mask must be boolean"),
        ({"train_mask": torch.ones(4, 3, dtype=torch.bool)}, "one column per split"),
        ({"x": torch.tensor([[0.0], [1.0], [float("nan")], [2.0]])}, r"the first at node 2\).*torch.nan_to_num\(x\)"),
        ({"x": torch.eye(4).to_sparse()}, "x is sparse"),
        ({"edge_weight": torch.ones(2)}, "edge_weight has shape"),
        ({"n_id": torch.arange(4)}, r"\['n_id'\] are names that batches use"),
        ({"y": torch.ones(4, dtype=torch.complex64)}, "y must hold classes or real numbers"),
        ({"edge_weight": torch.tensor([1.0, float("inf"), 1.0])}, "edge_weight holds NaN or infinite .* at edge 1"),
        ({"x": torch.ones(4, 0)}, "rows without a number"),
        (
            {"x": torch.ones(4, 2, dtype=torch.int8), "x_scale": torch.ones(4)},
            "store .x . x_scale.view.-1, 1...half.. as x and leave x_scale out",
        ),
    ],
)
def test_what_would_go_wrong_later_is_refused_now(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Graph.from_pyg(small(**changes))


def test_edges_that_are_said_twice_are_read_once() -> None:
    adj_t = torch.sparse_coo_tensor(torch.tensor([[1], [0]]), torch.ones(1), (3, 3))
    data = Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), adj_t=adj_t)
    graph = Graph.from_pyg(data)
    assert graph.num_edges == 1 and "adj_t" not in graph.node_arrays


def test_the_checks_can_be_answered() -> None:
    hole = small(x=torch.full((4, 2), float("nan")))
    assert Graph.from_pyg(hole, check_features=False).num_nodes == 4
    assert Graph.from_pyg(small(y=torch.rand(4)), float_labels=True).node_arrays["y"].is_floating_point()
    several = small(y=torch.rand(4, 5).round())  # many labels per node are floats by nature
    assert Graph.from_pyg(several).node_arrays["y"].shape == (4, 5)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"data must be a torch_geometric\.data\.Data, for"):
        Graph.from_pyg({"x": 1})  # type: ignore[arg-type]
    for changes in ({"x": np.ones((4, 2))}, {"train_mask": [True] * 4}, {"y": "abcd"}):
        with pytest.raises(TypeError, match=rf"data\.{next(iter(changes))} must be a tensor"):
            Graph.from_pyg(small(**changes))
    with pytest.raises(ValueError, match="no nodes"):
        Graph.from_pyg(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=0))


INDPTR, INDICES = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
DOORS: dict[str, Callable[[Arrays, Arrays], Any]] = {
    "Graph": lambda nodes, edges: Graph(INDPTR, INDICES, nodes, edges),
    "from_edge_index": lambda nodes, edges: Graph.from_edge_index(torch.tensor([[1, 0], [0, 1]]), 2, nodes, edges),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_names_that_batches_or_files_need_are_refused(door: Callable[..., Any]) -> None:
    for name in [*sorted(RESERVED - {"n_id"}), "a/b", "..", "a\n", "", "y" * 300]:
        for nodes, edges in (({name: INDICES}, {}), ({}, {name: INDICES})):
            with pytest.raises((ValueError, TypeError), match="name"):
                door(nodes, edges)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("nodes", "edges", "named"),
    [(["a"], ["a"], "a"), (["edge_a"], [], "edge_a"), ([], ["x"], "x"), ([], ["val_mask"], "val_mask")],
)
def test_what_could_be_of_nodes_and_of_edges_is_refused(door, nodes, edges, named) -> None:
    with pytest.raises(ValueError, match=rf"\['{named}'\] would be taken for arrays of nodes and of edges"):
        door(dict.fromkeys(nodes, INDICES), dict.fromkeys(edges, INDICES))


ODD_TENSORS = {
    "sparse": (torch.eye(2).to_sparse(), "to_dense"),
    "meta": (torch.ones(2, device="meta"), "device 'meta'"),
    "gradient": (torch.ones(2, requires_grad=True), "detach"),
    "float8": (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn, which cannot be computed with"),
    "uint64": (torch.ones(2, dtype=torch.uint64), r"uint64, which cannot be computed with: give .*\bz\b.*\.long\(\)"),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(("tensor", "message"), ODD_TENSORS.values(), ids=ODD_TENSORS)
def test_tensors_that_no_loop_knows_are_refused(door: Callable[..., Any], tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        door({"z": tensor}, {})


def test_names_inside_of_the_package_stay(tmp_path: Path) -> None:
    part = Graph(INDPTR, INDICES, {"z": torch.ones(2)}).induced(torch.tensor([1, 0]))
    part.node_arrays["coverage"] = torch.ones(2)
    assert pickle.loads(pickle.dumps(part)).induced(torch.tensor([0])).node_arrays["n_id"].tolist() == [1]
    del part.node_arrays["coverage"]
    part.save(tmp_path / "part")
    assert Graph.open(tmp_path / "part").node_arrays["n_id"].tolist() == [1, 0]


def test_as_many_nodes_as_no_machine_holds_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_nodes must be an integer between 1 and 3037000499"):
        Graph.from_edge_index(torch.tensor([[0], [1]]), 2**45)


def test_targets_of_regression_are_no_classes() -> None:
    with pytest.raises(ValueError, match=r"y holds torch\.int64"):
        Graph.from_pyg(small(), float_labels=True)


def test_classes_in_one_column_are_one_for_each_node(tmp_path: Path) -> None:
    data = Data(num_nodes=3, edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([[2], [-1], [0]]))
    data.train_mask = torch.tensor([True, False, True])
    assert Graph.from_pyg(data).node_arrays["y"].tolist() == [2, -1, 0]
    torch.save(data, tmp_path / "data.pt")
    prepare_graph(tmp_path / "data.pt", tmp_path / "graph")
    assert Graph.open(tmp_path / "graph").node_arrays["y"].tolist() == [2, -1, 0]
    data.y = torch.tensor([[0.5], [1.5], [2.5]])  # a loss of outputs of one column takes targets of one
    assert Graph.from_pyg(data, float_labels=True).node_arrays["y"].shape == (3, 1)


def test_nodes_in_two_splits_are_told(logged: list[str]) -> None:
    Graph.from_pyg(small(val_mask=torch.tensor([False, True, True, False])))
    assert logged == ["train_mask and val_mask share 1 nodes: figures on these nodes say little about others"]


def test_a_mask_that_was_changed_is_looked_at_again() -> None:
    graph = Graph.from_pyg(small())
    graph.node_arrays["train_mask"] = torch.tensor([0.5, 0, 0, 0])
    with pytest.raises(ValueError, match="train_mask must be boolean"):
        graph.split("train")


@pytest.mark.parametrize("name", ["val_idx", "valid_idx"])
def test_ids_of_a_split_become_its_mask(name: str) -> None:
    graph = Graph.from_pyg(small(train_idx=torch.tensor([1, 0]), **{name: torch.tensor([3], dtype=torch.int32)}))
    assert set(graph.node_arrays) == {"x", "y", "train_mask", "val_mask"}
    assert [graph.split(split).tolist() for split in ("train", "val")] == [[0, 1], [3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_idx": torch.tensor([0])}, "train_idx names 1 nodes, and data.train_mask marks others: .*del data"),
        ({"val_idx": torch.tensor([0]), "valid_idx": torch.tensor([1])}, "valid_idx names 1 nodes, and data.val_mask"),
        ({"test_idx": torch.tensor([0, 4])}, r"test_idx must hold ids of nodes, in \[0, 4\), got 0 to 4"),
        ({"test_idx": torch.tensor([True] * 4)}, "test_idx must be a vector of node ids"),
        (
            {"train_idx": torch.tensor([0, 1, 0])},
            r"train_idx lists 3 nodes and names 2, .*give data.train_idx.unique\(\)\. To learn more .* weigh their",
        ),
    ],
)
def test_ids_that_make_no_split_are_refused(changes: Arrays, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph.from_pyg(small(**changes))


@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_label_that_is_nan_is_no_label(columns: tuple[int, ...], logged: list[str]) -> None:
    y = torch.rand(4, *columns)
    y[1] = y[3] = torch.nan
    if columns:
        y[0, 0] = torch.nan  # it has another
    graph = Graph.from_pyg(small(y=y, test_mask=torch.tensor([False, False, True, True])), float_labels=True)
    assert [graph.split(split).tolist() for split in ("train", "test")] == [[0], [2]]
    assert "1 nodes of train_mask, 1 nodes of test_mask of the graph have NaN for a label" in "".join(logged)
