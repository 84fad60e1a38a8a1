"""Settings of batches: an evaluation that draws says that it estimates, and what cannot go together is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lightning_gnn_dist import (
    Evaluation,
    GlobalBatching,
    LadiesSampler,
    LinkDataModule,
    NeighborSampler,
    PartitionedDataModule,
    communities,
    split_edges,
)

SOME = Evaluation(batch_size=50, sampler=NeighborSampler([2, 3]))


def test_an_evaluation_may_draw_neighbours_and_says_once_that_it_estimates(caplog: pytest.LogCaptureFixture) -> None:
    graph = communities(300, 3, num_features=4, mean_degree=12.0)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), evaluation=SOME)
    with caplog.at_level(logging.INFO, "lightning_gnn_dist"):
        loaders = [data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
    assert [record.message for record in caplog.records if "estimates" in record.message] == [
        "Evaluation draws neighbours with NeighborSampler(num_neighbors=(2, 3), replace=False, weight=None): figures "
        "are estimates."
    ]
    for loader, whole in zip(loaders, (graph.split("val"), graph.split("test"), torch.arange(300)), strict=True):
        first, second = list(loader), list(loader)
        assert torch.equal(torch.cat([batch.n_id[: batch.batch_size] for batch in first]), whole)
        for batch in first:
            assert max(block.adj.crow_indices().diff().max() for block in batch.blocks) <= 3
            assert batch.blocks[-1].adj.crow_indices().diff().max() <= 2
        assert any(one.n_id.tolist() != two.n_id.tolist() for one, two in zip(first, second, strict=True))
        loader.set_epoch(0)
        assert [batch.n_id.tolist() for batch in loader] == [batch.n_id.tolist() for batch in first]


def test_held_edges_are_judged_by_the_neighbours_that_are_drawn() -> None:
    graph = communities(300, 3, num_features=4, mean_degree=12.0)
    split = split_edges(graph, 0.1, 0.1, negatives=3)
    drawn = LinkDataModule(split, sampler=NeighborSampler([5, 5]), evaluation=SOME)
    for batch in drawn.val_dataloader():
        assert batch.blocks[-1].adj.crow_indices().diff().max() <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation": Evaluation(sampler=NeighborSampler([3]))}, "evaluation samples 1 hops and sampler"),
        ({"global_batching": GlobalBatching(sampler=NeighborSampler([3]))}, "global_batching samples 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionedDataModule(communities(60, 3), sampler=NeighborSampler([5, 5]), **options)


def test_only_neighbours_that_are_drawn_alike_estimate_figures() -> None:
    with pytest.raises(TypeError, match=r"sampler must be an object such as NeighborSampler\(\[50, 50\]\), got Ladies"):
        Evaluation(sampler=LadiesSampler([8, 8]))
