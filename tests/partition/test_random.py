"""Random parts: balanced, alike, and without most of their edges."""

import pytest

from lightning_gnn_dist import RandomPartitioner, communities
from lightning_gnn_dist.partition.random import deal
from tests.partition.graphs import path_graph


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_counts_differ_by_one_at_most(num_parts: int) -> None:
    counts = RandomPartitioner()(path_graph(1001), num_parts, seed=0).counts()
    assert counts.max() - counts.min() <= 1


def test_one_edge_in_p_stays_and_parts_look_alike() -> None:
    graph = communities(8000, 8, num_features=2, train_share=0.5)
    report = RandomPartitioner()(graph, 8, seed=0).report(graph)
    assert report.cut_ratio == pytest.approx(7 / 8, abs=0.01)
    assert report.worst_label_skew is not None
    assert report.worst_label_skew < 0.15


def test_the_deal_never_changes() -> None:
    # Ranks that compute it by themselves must agree, so must a run and the one that resumes it.
    assert deal(12, 3, seed=0).tolist() == [0, 1, 0, 1, 0, 0, 2, 1, 2, 2, 1, 2]
