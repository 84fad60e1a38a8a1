"""Super-nodes lie between METIS and random parts."""

import pytest
import torch

from lightning_gnn_dist import (
    MetisPartitioner,
    RandomPartitioner,
    StreamingPartitioner,
    SuperNodePartitioner,
    communities,
)
from lightning_gnn_dist.partition import metis
from tests.partition.graphs import path_graph

GRAPH = communities(4000, 8, num_features=2, train_share=0.5, homophily=0.9)


def test_supernodes_stay_whole_and_are_dealt_evenly() -> None:
    supernodes = MetisPartitioner()(GRAPH, 50, seed=4).assignment
    partition = SuperNodePartitioner(50)(GRAPH, 8, seed=4)
    pairs = torch.stack([supernodes, partition.assignment]).unique(dim=1)  # (2, distinct pairs)
    assert pairs.shape[1] == 50
    dealt = torch.bincount(pairs[1], minlength=8)
    assert dealt.max() - dealt.min() <= 1


def test_they_lie_between_metis_and_random_in_cut_and_in_skew() -> None:
    metis = MetisPartitioner()(GRAPH, 8, seed=0).report(GRAPH)
    supernodes = SuperNodePartitioner(80)(GRAPH, 8, seed=0).report(GRAPH)
    random = RandomPartitioner()(GRAPH, 8, seed=0).report(GRAPH)
    assert metis.cut_ratio < supernodes.cut_ratio < random.cut_ratio
    assert metis.worst_label_skew is not None
    assert supernodes.worst_label_skew is not None
    assert random.worst_label_skew is not None
    assert metis.worst_label_skew > supernodes.worst_label_skew > random.worst_label_skew


def test_there_are_fifty_for_each_part_where_no_number_is_given() -> None:
    assert torch.equal(
        SuperNodePartitioner()(GRAPH, 3, 0).assignment, SuperNodePartitioner(150)(GRAPH, 3, 0).assignment
    )
    graph = path_graph(64)
    assert torch.equal(SuperNodePartitioner()(graph, 4, 0).assignment, SuperNodePartitioner(64)(graph, 4, 0).assignment)
    assert [str(SuperNodePartitioner(*number)) for number in ((), (8,))] == [
        "SuperNodePartitioner()",
        "SuperNodePartitioner(num_supernodes=8)",
    ]


def test_another_partitioner_finds_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    clusters = StreamingPartitioner()(GRAPH, 60, 1).assignment
    partition = SuperNodePartitioner(60, StreamingPartitioner())(GRAPH, 4, 1)
    assert torch.stack([clusters, partition.assignment]).unique(dim=1).shape[1] == 60  # each in one part


def test_one_supernode_per_node_is_random() -> None:
    graph = path_graph(64)
    partition = SuperNodePartitioner(64)(graph, 4, seed=0)
    assert partition.counts().tolist() == [16, 16, 16, 16]
    assert partition.report(graph).cut_ratio > 0.5


@pytest.mark.parametrize(
    ("num_supernodes", "message"),
    [
        (2, r"num_supernodes \(2\) must be at least num_parts \(4\): every part needs a super-node"),
        (11, r"num_supernodes \(11\) must not exceed the graph's nodes \(10\)"),
    ],
)
def test_impossible_numbers_are_refused(num_supernodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuperNodePartitioner(num_supernodes)(path_graph(10), 4, seed=0)
