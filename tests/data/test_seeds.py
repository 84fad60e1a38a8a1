"""The seed of a data module: as given, or that of ``seed_everything``, the same on all ranks and after a resumption."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import (
    LinkDataModule,
    LocalSGDStrategy,
    PartitionedDataModule,
    RandomPartitioner,
    split_edges,
)
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

KINDS = [PartitionedDataModule, LinkDataModule]


def data_with(seed: int | None = None) -> PartitionedDataModule:
    return PartitionedDataModule(small_graph(), partitioner=RandomPartitioner(), batch_size=30, seed=seed)


def seen(data: pl.LightningDataModule) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in data.train_dataloader()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_data_module_leaves_its_seed_open(kind: type) -> None:
    assert inspect.signature(kind).parameters["seed"].default is None


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
