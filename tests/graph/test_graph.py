"""The graph: rows, degrees, induced subgraphs and halos, against brute force."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import subgraph

from lightning_gnn_dist import Graph, citations, communities
from lightning_gnn_dist.graph import rows as rows_module


def random_edges(num_nodes: int = 40, num_edges: int = 200, seed: int = 0) -> Tensor:
    """Directed, with loops and duplicates; the last five nodes have no edges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes - 5, (2, num_edges), generator=generator)


def edge_pairs(graph: Graph) -> list[tuple[int, int]]:
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return sorted(zip(graph.indices.tolist(), receiver.tolist(), strict=True))


@pytest.fixture
def graph() -> Graph:
    edge_index = random_edges()
    weight = edge_index[0] * 100.0 + edge_index[1]  # tells which edge it belongs to
    return Graph.from_edge_index(edge_index, 40, {"x": torch.arange(40.0)[:, None]}, {"edge_weight": weight})


def test_rows_list_the_senders_in_order(graph: Graph) -> None:
    edge_index = random_edges()
    for node in range(40):
        row = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        assert row.tolist() == sorted(edge_index[0][edge_index[1] == node].tolist())
    assert graph.indices.dtype == torch.int32 and graph.indptr.dtype == torch.int64


def test_edge_arrays_follow_their_edges(graph: Graph) -> None:
    receiver = torch.arange(40).repeat_interleave(graph.degrees())
    assert torch.equal(graph.edge_arrays["edge_weight"], graph.indices * 100.0 + receiver)


@pytest.mark.parametrize("edges_at_once", [1, 7, 1 << 24])
@pytest.mark.parametrize("nodes", [[3, 30, 7, 38, 0], list(range(39, -1, -1)), [], [37]])
def test_induced_is_the_subgraph_with_local_ids(
    graph: Graph, nodes: list[int], edges_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", edges_at_once)
    monkeypatch.setattr(rows_module, "NODES_PER_PIECE", 2 * edges_at_once)
    ids = torch.tensor(nodes, dtype=torch.int64)
    part = graph.induced(ids)
    expected, _ = subgraph(ids, random_edges(), num_nodes=40)
    n_id = part.node_arrays["n_id"]
    assert n_id.tolist() == nodes
    assert part.node_arrays["x"].flatten().tolist() == nodes
    found = sorted((nodes[u], nodes[v]) for u, v in edge_pairs(part))
    assert found == sorted(map(tuple, expected.t().tolist()))
    receiver = n_id.repeat_interleave(part.degrees())
    assert torch.equal(part.edge_arrays["edge_weight"], n_id[part.indices.long()] * 100.0 + receiver)


def test_a_part_of_a_part_keeps_the_ids_of_the_whole(graph: Graph) -> None:
    part = graph.induced(torch.tensor([10, 20, 30])).induced(torch.tensor([2, 0]))
    assert part.node_arrays["n_id"].tolist() == [30, 10]


def test_halo_is_who_sends_from_outside(graph: Graph) -> None:
    nodes = torch.tensor([1, 5, 9, 39])
    sender, receiver = random_edges()
    outside = torch.isin(receiver, nodes) & ~torch.isin(sender, nodes)
    assert graph.halo(nodes).tolist() == sorted(set(sender[outside].tolist()))


def test_a_node_given_twice_or_outside_the_graph_is_refused(graph: Graph) -> None:
    with pytest.raises(ValueError, match="node 3 is given twice"):
        graph.induced(torch.tensor([3, 4, 3]))
    with pytest.raises(ValueError, match=r"must lie in \[0, 40\), got 3 to 40"):
        graph.induced(torch.tensor([3, 40]))


def test_a_missing_split_names_those_there_are(graph: Graph) -> None:
    with pytest.raises(ValueError, match="no train_mask"):
        graph.split("train")


def test_the_fingerprint_tells_structures_and_training_nodes_apart() -> None:
    edges = random_edges()
    mask = torch.arange(40) < 4
    plain, again = (Graph.from_edge_index(edges, 40, {"train_mask": mask}) for _ in range(2))
    others = [
        Graph.from_edge_index(edges, 41),
        Graph.from_edge_index(edges.flip(0), 40, {"train_mask": mask}),
        Graph.from_edge_index(edges, 40, {"train_mask": ~mask}),
    ]
    assert plain.fingerprint == again.fingerprint
    assert plain.fingerprint not in {other.fingerprint for other in others}


def test_a_graph_in_memory_can_be_pickled(graph: Graph) -> None:
    copy = pickle.loads(pickle.dumps(graph))
    assert edge_pairs(copy) == edge_pairs(graph) and torch.equal(copy.node_arrays["x"], graph.node_arrays["x"])


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([0]), "must hold integers, got torch.float32 and torch.int64"),
        (torch.tensor([0, 1]), torch.tensor([0.0]), "must hold integers, got torch.int64 and torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([0, 0]), "indptr must start at 0, got 1"),
        (torch.tensor([0, 2, 1, 3]), torch.tensor([0, 0, 0]), "must not fall, but row 1 goes from 2 to 1"),
        (torch.tensor([0, 1, 2]), torch.tensor([0, 2]), r"indices must lie in \[0, 2\), got 0 to 2"),
        (torch.tensor([0, 1, 2]), torch.tensor([-1, 1]), r"indices must lie in \[0, 2\), got -1 to 1"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        Graph(indptr, indices)


def test_a_graph_without_types_counts_as_one_of_one_type(graph: Graph) -> None:
    assert list(graph.types.node_arrays) == [""] and graph.types.node_arrays[""] is graph.node_arrays
    assert list(graph.types.edge_arrays) == [("", "", "")] and graph.types.edge_arrays["", "", ""] is graph.edge_arrays


def test_an_attribute_that_is_an_array_is_told_where_it_is() -> None:
    graph = communities(60, 2, num_features=4)
    with pytest.raises(AttributeError, match=r"^a Graph has no attribute 'x': read it as graph\.node_arrays\['x'\]$"):
        _ = graph.x  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError, match=r"no attribute 'feat': its arrays are x, y, train_mask, val_mask, test_mask$"
    ):
        _ = graph.feat  # type: ignore[attr-defined]
    typed = citations(600, 6)
    with pytest.raises(AttributeError, match=r"'y': read it as graph\.types\.node_arrays\['paper'\]\['y'\]$"):
        _ = typed.y  # type: ignore[attr-defined]
    assert not hasattr(graph, "x") and copy.deepcopy(graph).num_nodes == 60


def test_what_a_graph_shows_is_where_it_says() -> None:
    graph = communities(30, 2, num_features=2)
    assert "node_arrays=['x', 'y', " in repr(graph) and "edge_arrays=[]" in repr(graph)
