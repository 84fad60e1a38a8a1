"""The built-in graph has the properties that its docstring promises."""

from __future__ import annotations

import pytest
import torch

from lightning_gnn_dist import communities


def test_the_seed_decides_everything() -> None:
    first, again, other = communities(500, 4), communities(500, 4), communities(500, 4, seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.node_arrays["x"], again.node_arrays["x"])


def test_edges_are_symmetric_distinct_and_mostly_inside_communities() -> None:
    graph = communities(4000, 5, homophily=0.8)
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    sender = graph.indices.long()
    forth, back = sender * 4000 + receiver, receiver * 4000 + sender
    assert torch.equal(forth.sort().values, back.sort().values)
    assert forth.unique().numel() == graph.num_edges and not (sender == receiver).any()
    label = graph.node_arrays["y"]
    assert (label[sender] == label[receiver]).float().mean() == pytest.approx(0.8 + 0.2 / 5, abs=0.03)
    assert graph.num_edges / 4000 == pytest.approx(10, rel=0.1)


def test_every_node_is_in_one_split() -> None:
    graph = communities(1000, train_share=0.2)
    masks = torch.stack([graph.node_arrays[f"{name}_mask"] for name in ("train", "val", "test")]).int()
    assert masks.sum(0).eq(1).all() and masks.sum(1).tolist() == [200, 400, 400]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least twice"):
        communities(5, 8)


def test_a_graph_that_no_machine_holds_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="So large a graph would take"):
        communities(1000, 2, num_features=10**9)
