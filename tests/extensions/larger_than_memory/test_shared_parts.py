"""The part of a host lies in memory once, however many ranks hold it; whoever dies, the others have it."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    Halo,
    Holding,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    Sweep,
    citations,
    communities,
)
from lightning_gnn_dist.extensions.larger_than_memory.shared_parts import SharedPartReader, Shelf
from lightning_gnn_dist.homes.parts import Holder, PartReader
from tests.conftest import module_of
from tests.data_fitting import trainer_on_hosts
from tests.every_strategy import PATIENCE
from tests.memory import reads_memory
from tests.pages import ROOT
from tests.ranks import join, run_ranks, start_ranks

WIDTH = 256
share_of_pages: Any = module_of(ROOT / "benchmarks" / "host_memory.py").share_of_pages


def graph() -> Graph:
    return communities(8000, 4, num_features=WIDTH, train_share=0.1, seed=0)


def data_of(source: Graph, **options: Any) -> PartitionedDataModule:
    how: dict[str, Any] = {"partitioner": RandomPartitioner(), "sampler": NeighborSampler([2, 2]), "seed": 1}
    return PartitionedDataModule(source, **(how | options))


class Looks(pl.LightningModule):
    """Looks where the features of its part are, once all ranks have read all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 2)
        self.share = 0.0

    def training_step(self, batch: Any) -> Tensor:
        if not self.share:
            x = self.trainer.datamodule._home.running_part().node_arrays["x"]  # type: ignore[attr-defined]
            x.sum()
            self.trainer.strategy.barrier()
            self.share = share_of_pages(x) / x.nbytes
            self.trainer.strategy.barrier()
        return self.linear(batch.x)[: batch.batch_size].square().mean()

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def looked(rank: int, world_size: int) -> float:
    module, data = Looks(), data_of(graph(), holding=Holding(Sweep(chunks=1, of=2), per="host"), batch_size=32)
    how = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    trainer_on_hosts(rank, world_size, 1, GrappaStrategy(**PATIENCE), **how).fit(module, data)
    return module.share


@reads_memory
def test_a_host_has_its_part_once() -> None:
    for num_ranks in (2, 4):
        assert 0.5 < sum(run_ranks(looked, num_ranks)) < 1.2


def readers(made: Graph, folder: Path, num_members: int, **options: Any) -> tuple[PartReader, SharedPartReader]:
    """What reads parts of host 1 of two by itself, and for all ranks."""
    home = data_of(made, **options)._home
    own = home._reader(1, 2)  # type: ignore[attr-defined]
    return own, SharedPartReader(**vars(own), folder=folder, num_members=num_members)


@pytest.mark.parametrize("made", [graph, lambda: citations(6000)], ids=["plain", "typed"])
def test_a_part_that_is_mapped_is_the_part_that_was_read(made: Any, tmp_path: Path) -> None:
    how = {"holding": Holding(Redeal(6), per="host"), "boundary": Halo(1)}
    own, shared = readers(made(), tmp_path, 2, **how)
    before = None
    for super_epoch in range(2):
        expected = own.read(super_epoch)
        for found in (shared.read(super_epoch, before), shared.read(super_epoch, before)):
            assert found.graph.node_arrays.keys() == expected.graph.node_arrays.keys()
            for name, array in expected.graph.arrays.items():
                assert found.graph.arrays[name].equal(array), name
            assert found.graph.split("train").equal(expected.graph.split("train"))
        before = found
    assert not [each for each in tmp_path.iterdir() if each.suffix != ".lock"]  # all have read both


def dies_or_reads(rank: int, world_size: int, folder: Path) -> int:
    _, shared = readers(graph(), folder, world_size)
    if rank == 0:
        object.__setattr__(shared, "_write", lambda *_: ((folder / "begun").touch(), time.sleep(60)))
    else:
        while not (folder / "begun").exists():
            time.sleep(0.01)
    return shared.read(0).graph.num_nodes


def test_if_the_rank_that_reads_a_part_dies_another_reads_it(tmp_path: Path) -> None:
    with start_ranks(dies_or_reads, 2, tmp_path) as ranks:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        ranks._processes[0].kill()
        assert ranks.results(may_die={0})[1] > 0


def hidden(rank: int, world_size: int) -> None:
    join(rank, world_size)
    if rank == 1:
        Path.is_dir = lambda self: False  # type: ignore[method-assign,assignment]  # another /tmp
    with pytest.raises(ValueError, match=r"rank 1 does not see .*parts-.* let TMPDIR name a folder"):
        Shelf(Holder(0, 1, rank, 2))


def test_ranks_of_a_host_that_see_other_files_are_refused() -> None:
    run_ranks(hidden, 2)
