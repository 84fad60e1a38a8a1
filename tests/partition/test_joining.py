"""New nodes join the parts of their neighbours; those that were there stay."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, Partition, communities
from lightning_gnn_dist.partition.joining import PASSES, join_partition
from tests.graph.changing.whole import FIRST, parted, typed


def by_hand(edge_index: Tensor, parts: list[int], num_new: int, num_parts: int, capacity: int) -> list[int]:
    """LDG with all else in its place: each new node goes where most neighbours are, less as a part fills up."""
    known, found = len(parts), [*parts, *[-1] * num_new]
    for _ in range(PASSES):
        sizes = [parts.count(part) for part in range(num_parts)]
        for node in range(known, known + num_new):
            links = [0] * num_parts
            for source, target in edge_index.T.tolist():
                for one, other in ((source, target), (target, source)):
                    if one == node and other != node and found[other] >= 0:
                        links[found[other]] += 1
            smallest = min(range(num_parts), key=lambda part: (sizes[part], part))
            open_parts = {smallest, *(part for part in range(num_parts) if links[part] and sizes[part] < capacity)}
            scores = {part: links[part] * (1 - sizes[part] / capacity) for part in open_parts}
            found[node] = max(open_parts, key=lambda part: (scores[part], -sizes[part], -part))
            sizes[found[node]] += 1
    return found


def grown(num_nodes: int = 120, known: int = 90) -> tuple[Graph, Graph]:
    data = communities(num_nodes, 3, num_features=2, seed=1).to_pyg()
    inside = (data.edge_index < known).all(0)
    old = Graph.from_edge_index(data.edge_index[:, inside], known)
    return old, old.extended({"num_nodes": num_nodes - known}, data.edge_index[:, ~inside])


def test_new_nodes_join_their_neighbours(caplog: pytest.LogCaptureFixture) -> None:
    old, later = grown()
    parts = torch.randint(3, (90,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    with caplog.at_level(logging.INFO, "lightning_gnn_dist"):
        joined = join_partition(Partition(parts, 3), later, slack=0.1)
    edge_index = later.to_pyg().edge_index
    assert joined.assignment.tolist() == by_hand(edge_index, parts.tolist(), 30, 3, int(1.1 * 120 / 3))
    assert joined.counts().max() <= 44 and old.num_nodes == 90
    at_new = (edge_index >= 90).any(0)
    cut = joined.assignment[edge_index[0]] != joined.assignment[edge_index[1]]
    shares = [f"{float(cut[some].double().mean()):.1%}" for some in (at_new, ~at_new)]
    assert f"{shares[0]} of their edges are cut, and {shares[1]} of the others" in caplog.text


def test_a_new_cut_is_advised_where_it_pays(caplog: pytest.LogCaptureFixture) -> None:
    ring = torch.stack([torch.arange(40), (torch.arange(40) + 1) % 40])
    old = Graph.from_edge_index(torch.cat([ring, ring.flip(0)], 1), 40)
    halves = Partition((torch.arange(40) // 20).int(), 2)
    for ends, says in (([3, 3], "would hardly save any"), ([3, 30], "may save")):
        pairs = torch.tensor([[40, 40], ends]).repeat(1, 20)
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning_gnn_dist"):
            join_partition(halves, old.extended({"num_nodes": 1}, torch.cat([pairs, pairs.flip(0)], 1)))
        assert says in caplog.text and "1 new nodes have joined 2 parts" in caplog.text


def test_nodes_with_types_stay_by_their_ids_in_them(tmp_path: Path) -> None:
    old, nodes, edges = parted(typed())
    Graph.from_pyg(old).save(tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    partition = Partition((torch.arange(graph.num_nodes) % 3).int(), 3)
    later = graph.extended(nodes, edges, ["editor"]).removed({"paper": [3]})
    joined = join_partition(partition, later, slack=0.2)
    for kind, count in FIRST.items():
        ids = torch.arange(count)
        there, now = graph.types.to_global(kind, ids), later.types.to_global(kind, ids)
        assert joined.assignment[now].equal(partition.assignment[there])
    assert joined.counts().max() <= int(1.2 * later.num_nodes / 3)
    again = join_partition(joined, later)
    assert again.assignment.equal(joined.assignment)


def test_a_partition_of_another_graph_is_refused() -> None:
    _, later = grown()
    with pytest.raises(ValueError, match="assigns 40 nodes, and the graph had 90, 120"):
        join_partition(Partition(torch.zeros(40, dtype=torch.int32), 2), later)
