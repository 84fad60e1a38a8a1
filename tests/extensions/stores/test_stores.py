"""A pair of PyG's stores becomes the graph of the Data that holds the same, whatever their layouts and types."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, EdgeAttr, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.utils import sort_edge_index

from lightning_gnn_dist import Graph, citations, communities
from lightning_gnn_dist.extensions.stores import contents as stores
from tests.graph.equal import check_equal


class Features(FeatureStore):
    """Rows of NumPy in a dictionary, which counts the most rows that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Any, np.ndarray[Any, Any]] = {}
        self.most = 0

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        self.rows[attr.group_name, attr.attr_name] = np.asarray(tensor)
        return True

    def _get_tensor(self, attr: TensorAttr) -> Any:
        assert attr.index is not None
        self.most = max(self.most, len(attr.index))  # type: ignore[arg-type]
        return self.rows[attr.group_name, attr.attr_name][np.asarray(attr.index)]

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self.rows.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> Any:
        return self.rows[attr.group_name, attr.attr_name].shape

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(*key) for key in self.rows]


class Edges(GraphStore):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[EdgeAttr, Any]] = []

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        self.held.append((edge_attr, edge_index))
        return True

    def _get_edge_index(self, edge_attr: EdgeAttr) -> Any:
        wanted = edge_attr.edge_type, edge_attr.layout
        return next(index for attr, index in self.held if (attr.edge_type, attr.layout) == wanted)

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        return False

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        return [attr for attr, _ in self.held]


def pointers(ids: Tensor, num_nodes: int) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ids, minlength=num_nodes).cumsum(0)])


def put_edges(store: Edges, layout: str, edge_index: Tensor, size: tuple[int, int], kind: Any = None) -> None:
    """The edges in a layout; compressed ones have to be in its order already."""
    senders, receivers = edge_index
    if layout == "csr":
        senders = pointers(senders, size[0])
    if layout == "csc":
        receivers = pointers(receivers, size[1])
    store.put_edge_index((senders, receivers), edge_type=kind, layout=layout, size=size)


def plain() -> Data:
    data = communities(300, 4, num_features=6).to_pyg()
    assert isinstance(data, Data)
    data.edge_weight = torch.rand(data.num_edges)
    return data


def pair_of(data: Data, layout: str = "coo", size: bool = True) -> tuple[Features, Edges]:
    features, edges = Features(), Edges()
    for name, value in data.to_dict().items():
        if isinstance(value, Tensor) and name != "edge_index":
            features.put_tensor(value, group_name=None, attr_name=name, index=None)
    nodes = (int(data.num_nodes or 0),) * 2
    put_edges(edges, layout, data.edge_index, nodes) if size else edges.put_edge_index(  # type: ignore[arg-type]
        tuple(data.edge_index), edge_type=None, layout="coo"
    )
    return features, edges


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_a_plain_graph_is_that_of_the_data(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BYTES_AT_ONCE", 50 * 6 * 8)  # 50 rows of x, and 300 of a label
    data = plain()
    data.edge_index, data.edge_weight = sort_edge_index(data.edge_index, data.edge_weight, sort_by_row=layout == "csr")
    features, edges = pair_of(data, layout)
    check_equal(Graph.from_pyg((features, edges)), Graph.from_pyg(data))
    assert features.most == 300 and Graph.from_pyg((features, edges), edge_ids=True).edge_arrays["e_id"].max() > 0


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BYTES_AT_ONCE", 7 * 6 * 8)
    data = Data(x=torch.randn(100, 6), edge_index=torch.tensor([[0], [99]]))
    features, edges = pair_of(data, size=False)
    check_equal(Graph.from_pyg((features, edges)), Graph.from_pyg(data))
    assert features.most == 7


def test_a_data_is_both_stores() -> None:
    data = plain()
    check_equal(Graph.from_pyg((data, data)), Graph.from_pyg(data))
    edges = Data(edge_index=data.edge_index, num_nodes=300)
    del data.edge_weight  # the store for features of a Data names those of nodes alone
    check_equal(Graph.from_pyg((data, edges)), Graph.from_pyg(data))


def test_a_graph_with_types_is_that_of_the_hetero_data() -> None:
    data = citations(600).to_pyg()
    assert isinstance(data, HeteroData)
    features, edges = Features(), Edges()
    for node_type in data.node_types:
        for name, value in data[node_type].to_dict().items():
            if isinstance(value, Tensor):
                features.put_tensor(value, group_name=node_type, attr_name=name, index=None)
    for kind in data.edge_types:
        size = data[kind[0]].num_nodes, data[kind[2]].num_nodes
        put_edges(edges, "coo", data[kind].edge_index, size, kind)
        for name, value in data[kind].to_dict().items():
            if name != "edge_index":
                features.put_tensor(value, group_name=kind, attr_name=name, index=None)
    found, ordered = Graph.from_pyg((features, edges)), HeteroData()
    for node_type in found.types.node_types if found.types else ():  # by first mention: of features, then of edges
        ordered[node_type].update(data[node_type].to_dict())
    for kind in data.edge_types:
        ordered[kind].update(data[kind].to_dict())
    expected = Graph.from_pyg(ordered)
    assert expected.types is not None
    assert found.types.num_nodes == expected.types.num_nodes
    check_equal(found, expected)
    check_equal(Graph.from_pyg((data, data)), Graph.from_pyg(data))


def broken(change: str) -> Any:
    features, edges = pair_of(plain())
    if change == "no pair":
        return features, features
    if change == "no edges":
        edges.held.clear()
    if change == "typed features":
        features.put_tensor(torch.ones(3), group_name="paper", attr_name="z", index=None)
    if change == "typed edges":
        put_edges(edges, "coo", torch.tensor([[0], [1]]), (2, 2), ("a", "to", "b"))
    if change == "size":
        edges.held[0][0].size = (300, 299)
    if change == "pointers":
        edges.held.clear()
        edges.put_edge_index((torch.tensor([0, 2, 1]), torch.tensor([0])), edge_type=None, layout="csr", size=(2, 2))
    if change == "nothing known":
        edges.held[0][0].size = None
        features.rows.clear()
    if change == "rows":
        features.rows[None, "x"] = features.rows[None, "x"][:-3]
    if change == "float ids":
        edges.held[0] = edges.held[0][0], (torch.rand(3), torch.rand(3))
    if change == "unequal sides":
        edges.held[0] = edges.held[0][0], (torch.tensor([0, 1]), torch.tensor([0]))
    return features, edges


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no pair", r"must be \(feature_store, graph_store\)"),
        ("no edges", r"Edges has no edges: get_all_edge_attrs\(\) is empty"),
        ("typed features", r"features of the types \['paper'\], but the edges have no types"),
        ("typed edges", r"edges of the types .*'to'.* and others of no type"),
        ("size", r"size \(300, 299\), but a graph without types"),
        ("pointers", r"pointers of None \(csr\) that do not begin at 0, fall"),
        ("nothing known", r"How many nodes there are is not known"),
        ("rows", r"x has shape \(297, 6\), but the graph has 300 nodes"),
        ("float ids", r"ids are integers"),
        ("unequal sides", r"2 senders and 1 receivers"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: str, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        Graph.from_pyg(broken(change))


def test_a_store_that_gives_other_rows_than_it_says_is_refused() -> None:
    features, edges = pair_of(plain())
    features._get_tensor_size = lambda attr: (301, 6)  # type: ignore[method-assign]
    features._get_tensor = lambda attr: np.zeros((2, 6))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"Features gives .* for 301 rows of 'x'"):
        Graph.from_pyg((features, edges))
