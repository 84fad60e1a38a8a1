"""One id space, rows in order of types, arrays by type: against loops over a small graph."""

import pickle

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph import rows as rows_module
from lightning_gnn_dist.graph.typed import build as build_module
from lightning_gnn_dist.graph.typed import types as types_module
from lightning_gnn_dist.graph.typed.types import GraphTypes
from tests.graph.typed.graphs import check_same, small


def types_of(graph: Graph) -> GraphTypes:
    return graph.types


def row_by_hand(data: HeteroData, kind: str, node: int, time: str | None) -> list[tuple[int, int]]:
    """The senders of a node, by their ids in the graph, with the number of the edge type."""
    first = {"paper": 0, "author": 12, "venue": 19}
    row = []
    for number, (source, _, target) in enumerate(data.edge_types):
        store = data.edge_stores[number]
        for place, (sender, receiver) in enumerate(store.edge_index.T.tolist()):
            if (target, receiver) != (kind, node):
                continue
            when = 0.0
            if time:
                times = store.get(time, data[source].get(time))
                when = 0.0 if times is None else float(times[place if time in store else sender])
            row.append((number, when, first[source] + sender))
    return [(sender, number) for number, _, sender in sorted(row)]


@pytest.mark.parametrize("time", [None, "time"])
def test_rows_are_in_order_of_type_time_and_sender(time: str | None) -> None:
    data = small()
    graph = Graph.from_pyg(data, time=time)
    types = types_of(graph)
    for node in range(graph.num_nodes):
        number, local = (int(found) for found in types.to_local(torch.tensor([node])))
        row = slice(int(graph.indptr[node]), int(graph.indptr[node + 1]))
        found = list(zip(graph.indices[row].tolist(), types.edge_type[row].tolist(), strict=True))
        assert found == row_by_hand(data, types.node_types[number], local, time)
    assert types.edge_type.dtype == torch.uint8 and types.time == time


def test_ids_of_a_type_and_of_the_graph() -> None:
    types = types_of(Graph.from_pyg(small()))
    assert types.num_nodes == {"paper": 12, "author": 7, "venue": 3} and types.offsets == (0, 12, 19, 22)
    assert types.nodes_of("author") == range(12, 19)
    ids = types.to_global("author", torch.tensor([6, 0]))
    assert ids.tolist() == [18, 12]
    number, local = types.to_local(torch.tensor([18, 0, 21]))
    assert (number.tolist(), local.tolist()) == ([1, 0, 2], [6, 0, 2])
    assert types.metadata == small().metadata()
    with pytest.raises(ValueError, match=r"ids of the node type 'author' must lie in \[0, 7\), got 7 to 7"):
        types.to_global("author", torch.tensor([7]))
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 22\), got 22"):
        types.to_local(torch.tensor([22]))
    with pytest.raises(ValueError, match=r"node_type must be one of \['paper', 'author', 'venue'\], got 'film'"):
        types.nodes_of("film")


def test_splits_and_arrays_belong_to_a_type() -> None:
    graph = Graph.from_pyg(small())
    types = types_of(graph)
    assert graph.split("train").tolist() == [0, 2, 4, 6, 8, 10, 12, 13]
    assert types.node_arrays["author"]["x"].dtype == torch.float16 and types.node_arrays["venue"] == {}
    assert types.edges_of(("paper", "in", "venue")).numel() == 0
    with pytest.raises(ValueError, match=r"No node type has a val_mask: set data\['paper'\].val_mask"):
        graph.split("val")


def test_it_goes_back_to_pyg_and_through_pickle() -> None:
    data = small()
    graph = Graph.from_pyg(data, edge_ids=True, time="time")
    for other in (graph, pickle.loads(pickle.dumps(graph))):
        other.check_edges()
        check_same(other.to_pyg(), data)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_the_part_of_some_nodes_is_pygs_subgraph(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows_module, types_module, build_module):
        monkeypatch.setattr(module, "EDGES_PER_PIECE", at_once)
    data = small()
    graph = Graph.from_pyg(data, edge_ids=True)
    types, picked = types_of(graph), {"paper": torch.tensor([1, 2, 5, 6, 11]), "author": torch.tensor([0, 3, 4, 6])}
    nodes = torch.cat([types.to_global(kind, ids) for kind, ids in picked.items()])
    part = graph.induced(nodes)
    part.check_edges()
    found, expected = part.to_pyg(), data.subgraph(picked | {"venue": torch.empty(0, dtype=torch.int64)})
    assert isinstance(found, HeteroData)
    for kind, ids in picked.items():
        assert torch.equal(found[kind].x, data[kind].x[ids]) and torch.equal(found[kind].n_id, ids)
    for edge_type in data.edge_types:
        ours, theirs = found[edge_type], expected[edge_type]
        assert sorted(ours.edge_index.T.tolist()) == sorted(theirs.edge_index.T.tolist())
        for name in set(theirs.keys()) - {"edge_index"}:
            assert torch.equal(ours[name], data[edge_type][name][ours.e_id]), name
        ends = [picked.get(end, torch.empty(0))[ids] for end, ids in zip(edge_type[::2], ours.edge_index, strict=True)]
        assert torch.equal(torch.stack(ends).long(), data[edge_type].edge_index[:, ours.e_id])
    with pytest.raises(ValueError, match="in the order of their types"):
        graph.induced(nodes.flip(0))


def test_degrees_and_halo_are_those_of_the_one_graph() -> None:
    data = small()
    graph, merged = Graph.from_pyg(data), data.to_homogeneous(add_node_type=False, add_edge_type=False)
    plain = Graph.from_edge_index(merged.edge_index, 22)
    assert torch.equal(graph.degrees(), plain.degrees())
    assert torch.equal(graph.halo(torch.arange(5)), plain.halo(torch.arange(5)))


def test_many_edge_types_take_two_bytes() -> None:
    data = HeteroData()
    data["a"].num_nodes = 2
    for number in range(257):
        data["a", f"r{number}", "a"].edge_index = torch.tensor([[0], [1]])
    graph = Graph.from_pyg(data, edge_ids=True)
    assert types_of(graph).edge_type.dtype == torch.int16
    check_same(graph.to_pyg(), data)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_ids_of_few_bits_do_not_overflow(dtype: torch.dtype) -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 300, 90
    data["b", "to", "b"].edge_index = torch.tensor([[89, 0], [88, 89]], dtype=dtype)
    graph = Graph.from_pyg(data)
    assert graph.indices.tolist() == [389, 300] and graph.degrees().nonzero().view(-1).tolist() == [388, 389]


def test_what_needs_one_array_for_all_nodes_refuses() -> None:
    graph = Graph.from_pyg(small())
    for use in (lambda: graph.node_arrays, lambda: graph.edge_arrays):
        with pytest.raises(ValueError, match=r"This needs a graph without types.*data\.to_homogeneous\(\)"):
            use()


def test_a_graph_without_edges_has_parts() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 3, 2
    data["a", "to", "b"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert Graph.from_pyg(data).induced(torch.tensor([0, 2, 3])).degrees().tolist() == [0, 0, 0]
