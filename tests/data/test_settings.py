"""Settings of batches: seeds, evaluations that draw and say so, and what cannot go together."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import (
    Evaluation,
    GlobalBatching,
    LinkDataModule,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
    split_edges,
)
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

SOME = Evaluation(batch_size=50, sampler=NeighborSampler([2, 3]))


def test_an_evaluation_may_draw_neighbours_and_says_once_that_it_estimates(informed: list[str]) -> None:
    graph = communities(300, 3, num_features=4, mean_degree=12.0)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), evaluation=SOME)
    loaders = [data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()]
    assert [line for line in informed if "estimates" in line] == [
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


def data_with(seed: int | None = None) -> PartitionedDataModule:
    return PartitionedDataModule(small_graph(), partitioner=RandomPartitioner(), batch_size=30, seed=seed)


def seen(data: pl.LightningDataModule) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in data.train_dataloader()]


def test_batches_follow_seed_everything_and_partitions_do_not() -> None:
    data, of_links = data_with(), LinkDataModule(split_edges(small_graph()), batch_size=50)
    assert (data.seed, seen(data)) == (0, seen(data_with(seed=0)))
    nodes, links = seen(data), seen(of_links)
    pl.seed_everything(2, verbose=False)
    assert seen(data) == seen(data_with(seed=2)) != nodes
    assert seen(of_links) != links
    assert seen(data_with(seed=0)) == nodes
    same, other = (data_with(seed).partition(2).assignment for seed in (0, 2))
    assert data.partition(2).assignment.equal(same) and not same.equal(other)


def test_a_seed_that_nobody_set_by_seed_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "two")
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED must be an integer between 0 and .*got 'two'"):
        seen(data_with())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_resumed_fit_keeps_its_seed(tmp_path: Path) -> None:
    pl.seed_everything(2, verbose=False)
    first = trainer(1, max_epochs=1)
    first.fit(model(), data_with())
    first.save_checkpoint(path := tmp_path / "first.ckpt")
    whole = trainer(1, max_epochs=2)
    whole.fit(model(), data_with())
    pl.seed_everything(3, verbose=False)
    data, resumed = data_with(), trainer(1, max_epochs=2)
    resumed.fit(model(), data, ckpt_path=path)
    assert data.seed == 2
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"a fit with seed 2, and this data module has seed=3, .*: give seed=2 to go"):
        trainer(1, max_epochs=2).fit(model(), data_with(seed=3), ckpt_path=path)
    trainer(1).validate(model(), data_with(seed=3), ckpt_path=path, verbose=False)  # it trains on nothing
    again = trainer(1, max_epochs=1)
    again.fit(model(), data)
    assert data.seed == 3  # another fit


def test_ranks_take_the_seed_of_rank_0() -> None:
    assert run_ranks(fit_of, 2, None) == [(4, None), (4, None)]


def test_ranks_with_other_seeds_are_refused() -> None:
    for _, error in run_ranks(fit_of, 2, [1, 7]):
        assert error == "All ranks need the same seed, and theirs are [1, 7]: give the same to each."


def fit_of(rank: int, world_size: int, given: list[int] | None) -> tuple[int, str | None]:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    pl.seed_everything(4 + rank, verbose=False)
    data = data_with(None if given is None else given[rank])
    try:
        trainer(world_size, LocalSGDStrategy(**PATIENCE), max_epochs=1).fit(model(), data)
    except ValueError as error:
        return data.seed, str(error)
    return data.seed, None
