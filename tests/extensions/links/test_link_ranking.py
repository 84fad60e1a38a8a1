"""MRR and Hits@k: ranks with ties, unequal shares, and what cannot be ranked."""

import math

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import LinkRanking
from tests.ranks import run_ranks


def batch(edges: list[float], negatives: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Scores and labels as a batch has them."""
    scores = torch.tensor(edges + [score for row in negatives for score in row])
    return scores, (torch.arange(scores.numel()) < len(edges)).float()


def results(ranking: LinkRanking) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in ranking.compute().items()}


def test_ranks_count_those_above_and_half_of_those_level() -> None:
    ranking = LinkRanking(hits=[1, 2])
    ranking.update(*batch([3.0, 3.0, 3.0], [[1.0, 2.0], [3.0, 1.0], [4.0, 5.0]]))  # ranks 1, 1.5, 3
    assert results(ranking) == {
        "mrr": round((1 + 1 / 1.5 + 1 / 3) / 3, 6),
        "hits@1": round(1 / 3, 6),
        "hits@2": round(2 / 3, 6),
    }


def test_a_constant_score_and_nan_earn_nothing() -> None:
    constant, nan = LinkRanking(hits=[1]), LinkRanking(hits=[1])
    constant.update(*batch([1.0], [[1.0] * 9]))
    assert results(constant) == {"mrr": round(1 / 5.5, 6), "hits@1": 0.0}
    nan.update(*batch([math.nan, 1.0], [[0.0] * 9, [math.nan] * 9]))
    assert results(nan) == {"mrr": 0.1, "hits@1": 0.0}


def test_unequal_batches_count_by_their_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    edges, negatives = torch.randn(40, generator=generator), torch.randn(40, 60, generator=generator)
    together, piecewise = LinkRanking(prefix="val/"), LinkRanking(prefix="val/")
    together.update(*batch(edges.tolist(), negatives.tolist()))
    for low, high in ((0, 1), (1, 20), (20, 40)):
        piecewise.update(*batch(edges[low:high].tolist(), negatives[low:high].tolist()))
    assert results(together) == results(piecewise)
    assert set(results(together)) == {"val/mrr", "val/hits@1", "val/hits@10", "val/hits@50"}


def test_a_fit_follows_a_test() -> None:
    ranking = LinkRanking(hits=[1])
    with torch.inference_mode():  # as trainer.test() runs
        ranking.reset()
        ranking.update(*batch([3.0], [[1.0, 2.0]]))
    ranking.update(*batch([1.0], [[2.0, 0.0]]))
    assert results(ranking) == {"mrr": 0.75, "hits@1": 0.5}


def rank_shares(rank: int, world_size: int) -> dict[str, float]:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    ranking = LinkRanking(hits=[1])
    if rank == 0:
        ranking.update(*batch([3.0, 1.0, 1.0], [[1.0, 2.0], [2.0, 0.0], [2.0, 3.0]]))  # ranks 1, 2, 3
    else:
        ranking.update(*batch([0.0], [[1.0, -1.0]]))  # rank 2
    return results(ranking)


def test_ranks_of_unequal_shares_find_the_mean_over_all_edges() -> None:
    expected = {"mrr": round((1 + 1 / 2 + 1 / 3 + 1 / 2) / 4, 6), "hits@1": 0.25}
    assert run_ranks(rank_shares, 2) == [expected, expected]


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"With 2 negatives for each edge, Hits@50 is always 1"):
        LinkRanking(hits=[1, 50]).update(*batch([1.0], [[0.0, 0.0]]))
    scores, label = batch([1.0, 1.0], [[0.0], [0.0]])
    for wrong in (scores[:-1], scores[:, None]):
        with pytest.raises(ValueError, match="a score for each target"):
            LinkRanking(hits=[1]).update(wrong, label)
    with pytest.raises(ValueError, match="as many negatives for each of its 3 edges"):
        LinkRanking(hits=[1]).update(scores, torch.tensor([1.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    ("scores", "labels", "words"),
    [
        (torch.rand(3, 1), torch.tensor([[1], [0], [0]]), "edge_label must be a vector of 1 and 0"),
        (torch.rand(4), torch.tensor([0.5, 0.5, 0.0, 0.0]), "edge_label must be a vector of 1 and 0"),
        (torch.rand(3), torch.tensor([0, 1, 0]), "all edges .* before their negatives"),
    ],
)
def test_labels_that_would_rank_something_else_are_refused(scores: Tensor, labels: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinkRanking([1]).update(scores, labels)


def test_a_batch_without_edges_is_refused() -> None:
    with pytest.raises(ValueError, match="edge_label must have an edge"):
        LinkRanking([1]).update(torch.ones(2), torch.zeros(2))


def test_the_default_is_what_the_negatives_allow() -> None:
    scores, labels = batch([1.0], [[0.0] * 20])
    ranking, called = LinkRanking(), LinkRanking(prefix="val/")
    with pytest.raises(TypeError, match="edge_label must be a tensor"):
        ranking.update(scores, None)
    ranking.update(scores, labels)
    assert results(ranking) == {"mrr": 1.0, "hits@1": 1.0, "hits@10": 1.0}
    assert set(called(scores, labels)) == set(called.compute()) == {"val/mrr", "val/hits@1", "val/hits@10"}
    assert set(ranking.clone().compute()) == set(ranking.compute())
    with pytest.raises(ValueError, match="With 5 negatives for each edge, Hits@10 is always 1"):
        ranking.update(*batch([1.0], [[0.0] * 5]))
