"""From PyG: what travels along, and what is refused with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.graph.graph import Graph


def small(**changes: Any) -> Data:
    arrays = {
        "x": torch.randn(4, 2),
        "y": torch.tensor([0, 1, 1, 0]),
        "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]),
        "train_mask": torch.tensor([True, True, False, False]),
    }
    return Data(**(arrays | changes))


def test_every_array_travels_along() -> None:
    data = small(edge_attr=torch.tensor([[1.0], [2.0], [3.0]]), node_year=torch.arange(4), name="small")
    graph = Graph.from_pyg(data)
    assert set(graph.node_arrays) == {"x", "y", "train_mask", "node_year"}
    assert set(graph.edge_arrays) == {"edge_attr"}
    assert graph.split("train").tolist() == [0, 1]


def test_as_many_edges_as_nodes_is_not_confusing() -> None:
    data = small(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), edge_type=torch.tensor([5, 6, 7, 8]))
    graph = Graph.from_pyg(data)
    assert set(graph.edge_arrays) == {"edge_type"}
    assert graph.edge_arrays["edge_type"].tolist() == [8, 5, 6, 7]


def test_a_homogeneous_view_of_a_heterogeneous_graph_is_taken() -> None:
    hetero = HeteroData()
    hetero["paper"].x, hetero["author"].x = torch.randn(3, 2), torch.randn(2, 2)
    hetero["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [0, 2]])
    with pytest.raises(NotImplementedError, match="to_homogeneous"):
        Graph.from_pyg(hetero)  # type: ignore[arg-type]
    graph = Graph.from_pyg(hetero.to_homogeneous())
    assert graph.num_nodes == 5 and "node_type" in graph.node_arrays and "edge_type" in graph.edge_arrays


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": torch.tensor([[0], [4]])}, "names node 4, but the graph has 4 nodes"),
        ({"edge_index": torch.tensor([[-1], [2]])}, "names node -1"),
        ({"edge_index": torch.tensor([[0.0], [2.0]])}, "must be integers"),
        ({"edge_index": None}, "no edge_index"),
        ({"y": torch.zeros(3)}, r"y has shape \(3,\), but the graph has 4 nodes and 3 edges"),
        ({"y": torch.zeros(4)}, r"data\.y\.long\(\).*float_labels=True"),
        ({"y": torch.tensor([-1, 0, 0, -1])}, "train_mask marks 1 nodes whose label is negative"),
        ({"train_mask": torch.tensor([1, 0, 0, 0])}, "train_mask must be boolean"),
        ({"train_mask": torch.ones(4, 3, dtype=torch.bool)}, "one column per split"),
        (
            {"x": torch.tensor([[0.0], [1.0], [float("nan")], [2.0]])},
            "the first at node 2.*check_features=False",
        ),
        ({"x": torch.eye(4).to_sparse()}, "x is sparse"),
        ({"edge_weight": torch.ones(2)}, "edge_weight has shape"),
        ({"n_id": torch.arange(4)}, r"\['n_id'\] are names that batches use"),
    ],
)
def test_what_would_go_wrong_later_is_refused_now(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Graph.from_pyg(small(**changes))


def test_the_checks_can_be_answered() -> None:
    hole = small(x=torch.full((4, 2), float("nan")))
    assert Graph.from_pyg(hole, check_features=False).num_nodes == 4
    assert Graph.from_pyg(small(y=torch.rand(4)), float_labels=True).node_arrays["y"].is_floating_point()
    several = small(y=torch.rand(4, 5).round())  # many labels per node are floats by nature
    assert Graph.from_pyg(several).node_arrays["y"].shape == (4, 5)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"data must be a torch_geometric\.data\.Data, for"):
        Graph.from_pyg({"x": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no nodes"):
        Graph.from_pyg(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=0))
