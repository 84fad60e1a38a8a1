"""Graphs that grow: what is there, what comes, and all of it made at once by hand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph

WRITES, CITES, AT, REVIEWS = (
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "at", "venue"),
    ("editor", "reviews", "paper"),
)
Nodes = dict[str, dict[str, Tensor]]
Edges = dict[tuple[str, str, str], dict[str, Tensor]]
FIRST = {"paper": 30, "author": 12, "venue": 3}
ALL = {"paper": 34, "author": 17, "venue": 3, "editor": 4}


def untyped(num_nodes: int = 40, num_edges: int = 160, seed: int = 0) -> Data:
    """A graph whose edges have ends anywhere, some of them twice."""
    draw = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.rand(num_nodes, 3, generator=draw, dtype=torch.float64),
        y=torch.randint(4, (num_nodes,), generator=draw),
        train_mask=torch.rand(num_nodes, generator=draw) < 0.5,
        edge_index=torch.randint(num_nodes, (2, num_edges), generator=draw),
        edge_weight=torch.rand(num_edges, generator=draw),
    )


def typed(seed: int = 0) -> HeteroData:
    """A graph with times of edges of one type, of senders of another, and of neither of the others."""
    draw, data = torch.Generator().manual_seed(seed), HeteroData()
    for kind, count in ALL.items():
        data[kind].x = torch.rand(count, 2 + len(kind) % 3, generator=draw)
    data["paper"].y = torch.randint(3, (ALL["paper"],), generator=draw)
    data["paper"].train_mask = torch.rand(ALL["paper"], generator=draw) < 0.5
    data["paper"].time = torch.randint(9, (ALL["paper"],), generator=draw)
    for kind, count in ((WRITES, 90), (CITES, 80), (AT, 50), (REVIEWS, 20)):
        ends = [torch.randint(ALL[kind[end]], (count,), generator=draw) for end in (0, 2)]
        data[kind].edge_index = torch.stack(ends)
    data[WRITES].time = torch.randint(9, (90,), generator=draw)
    data[CITES].edge_weight = torch.rand(80, generator=draw)
    return data


def parted(data: HeteroData) -> tuple[HeteroData, Nodes, Edges]:
    """What is there first, and what comes: nodes, the edges at one of them, and every third of the others."""
    old, nodes, edges = HeteroData(), {}, {}
    for kind, count in ALL.items():
        known = FIRST.get(kind, 0)
        if known:
            old[kind].update({name: value[:known] for name, value in data[kind].items()})
        if known < count:
            nodes[kind] = {name: value[known:] for name, value in data[kind].items()}
    for kind in data.edge_types:
        source, target = data[kind].edge_index
        is_new = (source >= FIRST.get(kind[0], 0)) | (target >= FIRST.get(kind[2], 0))
        is_new |= (torch.arange(len(source)) % 3 == 0) | (kind == REVIEWS)
        if kind != REVIEWS:
            old[kind].update({name: _rows(name, value, ~is_new) for name, value in data[kind].items()})
        edges[kind] = {name: _rows(name, value, is_new) for name, value in data[kind].items()}
    return old, nodes, edges


def in_turn(old: HeteroData, edges: Edges) -> HeteroData:
    """All edges, those that were there first, with which the nodes of the whole graph go."""
    whole = typed()
    for kind, new in edges.items():
        for name, value in new.items():
            known = [old[kind][name]] if kind in old.edge_types else []
            whole[kind][name] = torch.cat([*known, value], 1 if name == "edge_index" else 0)
    return whole


def rows_by_hand(data: HeteroData, kind: tuple[str, str, str], time: str | None) -> dict[int, list[tuple[float, ...]]]:
    """For each receiver the time, sender and weight of each edge of a type, in the order of the graph."""
    found: dict[int, list[tuple[float, ...]]] = {}
    for at, (source, target) in enumerate(data[kind].edge_index.T.tolist()):
        when = data[kind].get(time) if time else None
        moment = float(when[at]) if when is not None else 0.0
        if when is None and time and time in data[kind[0]]:
            moment = float(data[kind[0]][time][source])
        weight = float(data[kind].edge_weight[at]) if "edge_weight" in data[kind] else 0.0
        found.setdefault(target, []).append((moment, source, at, weight))
    return {node: [(s, w) for _, s, _, w in sorted(edges)] for node, edges in found.items()}


def rows_of(graph: Graph, kind: tuple[str, str, str]) -> dict[int, list[tuple[float, ...]]]:
    """The same of a graph, read from its rows."""
    types, found, places = graph.types, {}, graph.types.edges_of(kind).tolist()
    number, weights = types.edge_types.index(kind), types.edge_arrays[kind].get("edge_weight")
    for node in types.nodes_of(kind[2]):
        for at in range(int(graph.indptr[node]), int(graph.indptr[node + 1])):
            if int(types.edge_type[at]) == number:
                weight = 0.0 if weights is None else float(weights[places.index(at)])
                sender = int(graph.indices[at]) - types.nodes_of(kind[0]).start
                found.setdefault(node - types.nodes_of(kind[2]).start, []).append((sender, weight))
    return found


def _rows(name: str, value: Tensor, which: Tensor) -> Tensor:
    return value[:, which] if name == "edge_index" else value[which]
