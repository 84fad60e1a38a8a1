"""Edges that the user's own masks hold back: those, their other direction and their copies, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, LinkDataModule, NeighborSampler, split_edges
from tests.graph.typed.graphs import small

WRITES, BACK = ("author", "writes", "paper"), ("paper", "rev_writes", "author")


def pairs(edges: torch.Tensor) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.T}


def typed(**masks: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    """The small graph with a rating and masks on what authors write, and the type turned round; and these edges."""
    data = small()
    edges = torch.stack([torch.arange(7).repeat_interleave(5), torch.arange(35) * 5 % 12])
    edges = edges.T.unique(dim=0).T
    count = edges.shape[1]
    data[WRITES].edge_index, data[WRITES].edge_attr = edges, torch.rand(count, 2)
    data[WRITES].share = torch.rand(count)
    data[BACK].edge_index = edges.flip(0)
    for name, mask in {"val_mask": torch.arange(count) % 5 == 1, "test_mask": torch.arange(count) % 5 == 2}.items():
        data[WRITES][name] = mask
    data[WRITES].update(masks)
    return Graph.from_pyg(data), edges


@pytest.mark.parametrize("labels", [None, "share"])
def test_marked_edges_are_held_and_no_others(labels: str | None) -> None:
    graph, edges = typed()
    number = torch.arange(edges.shape[1])
    split = split_edges(graph, "val_mask", "test_mask", edge_type=WRITES, labels=labels)
    assert split.reverse == BACK
    for name, rest in (("val", 1), ("test", 2)):
        assert pairs(split.edges[name]) == pairs(edges[:, number % 5 == rest])
    left = split.graph.to_pyg()
    assert pairs(left[WRITES].edge_index) == pairs(edges[:, number % 5 > 2]) | pairs(edges[:, number % 5 == 0])
    assert pairs(left[BACK].edge_index.flip(0)) == pairs(left[WRITES].edge_index)
    assert sorted(left[WRITES].keys()) == sorted(["edge_index", "edge_attr", "share"])
    if labels is None:
        rivals = zip(split.edges["val"][0].tolist(), split.negatives["val"].tolist(), strict=True)
        assert not pairs(edges) & {(sender, receiver) for sender, receivers in rivals for receiver in receivers}
    else:
        places = {pair: i for i, pair in enumerate(zip(*edges.tolist(), strict=True))}
        rows = [places[int(a), int(b)] for a, b in split.edges["test"].T]
        assert split.held_arrays["test"]["share"].equal(shares_of(graph, edges)[rows])
    batch: Any = next(iter(LinkDataModule(split, sampler=NeighborSampler([2, 2])).train_dataloader()))
    assert batch[WRITES].edge_label_index.shape[0] == 2


def shares_of(graph: Graph, edges: torch.Tensor) -> torch.Tensor:
    """The shares in the order of ``edges``, found by their ends."""
    found = graph.to_pyg()[WRITES]
    of = {(int(a), int(b)): share for (a, b), share in zip(found.edge_index.T, found.share, strict=True)}
    return torch.stack([of[int(a), int(b)] for a, b in edges.T])


def test_a_pair_of_nodes_goes_together_where_there_are_no_types() -> None:
    """One direction is marked: both are held, and one of them, the same each time, is asked for."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])
    marks = torch.tensor([True] + [False] * 7), torch.tensor([False] * 3 + [True] + [False] * 4)
    graph = Graph.from_edge_index(edges, 6, {}, {"edge_val": marks[0], "edge_test": marks[1]})
    split = split_edges(graph, "edge_val", "edge_test", negatives=2)
    assert {frozenset(pair) for pair in pairs(split.edges["val"])} == {frozenset((0, 1))}
    assert {frozenset(pair) for pair in pairs(split.edges["test"])} == {frozenset((1, 2))}
    assert split.edges["val"].shape == split.edges["test"].shape == (2, 1) and not split.graph.edge_arrays
    assert pairs(split.graph.to_pyg().edge_index) == {(2, 3), (3, 2), (3, 0), (0, 3)}
    alone = split_edges(graph, 0, "edge_test", negatives=2)
    assert list(alone.edges) == ["test"] and alone.graph.num_edges == 6


ALL, NONE = torch.ones(35, dtype=torch.bool), torch.zeros(35, dtype=torch.bool)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a name and a share": ({}, {"test": 0.1}, "two shares, or two names of edge arrays .* got 'val_mask' and 0.1"),
    "no such mask": ({}, {"test": "tst"}, r"test names 'tst', and edges of type .* carry no array of that name"),
    "numbers": (
        {"val_mask": torch.ones(35)},
        {},
        r"val: val_mask must hold one boolean for each edge, got a tensor of",
    ),
    "none": ({"val_mask": NONE}, {}, "val marks no edge that can be held back"),
    "twice": ({"test_mask": ALL}, {}, r"val and test both mark edges between the same two nodes \(7 such pairs\)"),
    "all": ({"val_mask": ALL}, {"test": 0}, "mark all edges, and none is left to train on"),
    "time": (
        {"time": torch.arange(35)},
        {"time": "time"},
        "time='time' decides which edges are held: give val and test",
    ),
}


@pytest.mark.parametrize(("masks", "options", "message"), BAD.values(), ids=BAD)
def test_masks_that_hold_nothing_are_refused(masks: dict[str, Any], options: dict[str, Any], message: str) -> None:
    graph, edges = typed(**masks)
    assert edges.shape[1] == 35
    with pytest.raises(ValueError, match=message):
        split_edges(graph, **({"val": "val_mask", "test": "test_mask", "edge_type": WRITES} | options))
