"""Batches of the whole graph: a function of the round, shared by ranks without overlap."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from lightning_gnn_dist import NeighborSampler, communities
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.global_batches import GlobalBatches, OwnSeeds
from lightning_gnn_dist.batches.source import GraphSource

GRAPH = communities(300, 3, train_share=0.2)


def source_of(num_neighbors: list[int]) -> GraphSource:
    return GraphSource(GRAPH, NeighborSampler(num_neighbors))


@pytest.fixture(scope="module")
def whole() -> GlobalBatches:
    return GlobalBatches(source_of([3, 3]), GRAPH.split("train"), batch_size=16, seed=5)


def seeds(whole: GlobalBatches, *place: int, stop: int = 3) -> list[list[int]]:
    return [batch.n_id[: batch.batch_size].tolist() for batch in whole.of_round(*place, start=0, stop=stop)]


def test_the_slices_of_all_ranks_are_the_batch(whole: GlobalBatches) -> None:
    batches = seeds(whole, 4)
    slices = [seeds(whole, 4, rank, 3) for rank in range(3)]
    assert [len(batch) for batch in batches] == [16, 16, 16]
    for index, batch in enumerate(batches):
        assert sum((own[index] for own in slices), []) == batch  # noqa: RUF017
        assert len(set(batch)) == 16


def edges(*batches: SampledData) -> set[tuple[int, int, int]]:
    """Every edge by hop and by the ids of its ends."""
    found: set[tuple[int, int, int]] = set()
    for batch in batches:
        for hop, block in enumerate(batch.blocks):
            source, target = batch.n_id[block.edge_index].tolist()
            found |= {(hop, *edge) for edge in zip(source, target, strict=True)}
    return found


def test_slices_see_what_the_whole_sees_and_with_a_fan_out_a_little_more(whole: GlobalBatches) -> None:
    everything = replace(whole, source=source_of([-1, -1]))
    for batches in (everything, whole):
        slices = edges(*(next(batches.of_round(0, rank, 4)) for rank in range(4)))
        expected = edges(next(batches.of_round(0)))
        assert slices == expected if batches is everything else slices > expected


def test_a_round_and_a_place_decide(whole: GlobalBatches) -> None:
    assert seeds(whole, 4) == seeds(whole, 4)
    everything = [tuple(batch) for round_idx in range(3) for batch in seeds(whole, round_idx)]
    assert len(set(everything)) == 9
    later = [batch.n_id.tolist() for batch in whole.of_round(4, start=2, stop=3)]
    assert later == [list(islice(whole.of_round(4), 3))[2].n_id.tolist()]


def test_a_pass_takes_no_seed_twice_and_seeds_are_uniform(whole: GlobalBatches) -> None:
    one_pass = [node for batch in seeds(whole, 0) for node in batch]
    assert len(set(one_pass)) == 48
    counts = torch.zeros(300)
    for round_idx in range(60):
        for batch in seeds(whole, round_idx, stop=6):
            counts[batch] += 1
    train = whole.seeds
    assert counts.sum() == counts[train].sum() == 60 * 6 * 16
    assert counts[train].min() > 0.75 * 96 and counts[train].max() < 1.25 * 96


def test_a_batch_larger_than_the_training_nodes_is_all_of_them(whole: GlobalBatches) -> None:
    large = GlobalBatches(whole.source, whole.seeds, 10**9, 5)
    assert [sorted(batch) for batch in seeds(large, 0, stop=2)] == [whole.seeds.tolist()] * 2


def owned(sizes: list[int], rank: int, batch_size: int = 16) -> GlobalBatches:
    """Batches of ranks that own so many training nodes, one after the other."""
    ids = GRAPH.split("train").split(sizes)[rank]
    places = torch.arange(sum(sizes)).split(sizes)[rank]
    own = OwnSeeds(ids, places, sum(sizes), rank, len(sizes))
    return GlobalBatches(source_of([3, 3]), own, batch_size, 5, 2, None, True)


@pytest.mark.parametrize("sizes", [[60], [30, 30], [43, 0, 2, 15]])
def test_own_seeds_are_dealt_once_a_pass_and_evenly(sizes: list[int]) -> None:
    assert len(GRAPH.split("train")) == sum(sizes) == 60
    for round_idx in (0, 3):
        of_ranks = [
            list(owned(sizes, rank).of_round(round_idx, rank, len(sizes), stop=6)) for rank in range(len(sizes))
        ]
        assert {owned(sizes, rank).num_batches for rank in range(len(sizes))} == {3}
        for first in (0, 3):  # two passes
            seen = []
            for size, batches in zip(sizes, of_ranks, strict=True):
                counts = [batch.batch_size for batch in batches[first : first + 3]]
                assert sum(counts) == size and max(counts) - min(counts) <= 1
                for batch in batches[first : first + 3]:
                    asked = batch.n_id[: batch.batch_size]
                    assert asked.equal(GRAPH.split("train")[batch.input_id])
                    seen += asked.tolist()
            assert sorted(seen) == GRAPH.split("train").tolist()
    orders = [
        [b.n_id[: b.batch_size].tolist() for b in owned(sizes, 0).of_round(r, 0, len(sizes), stop=3)] for r in (0, 1)
    ]
    assert orders[0] != orders[1]


def test_nobody_deals_the_seeds_of_others() -> None:
    with pytest.raises(ValueError, match=r'rank 1 of 2 knows its own seeds alone: use way="sliced"'):
        next(owned([30, 30], 1).of_round(0))
