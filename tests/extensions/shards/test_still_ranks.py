"""A rank that stands still while others wait for nodes of its shard is named by them."""

from pathlib import Path

import pytest

from lightning_gnn_dist import GrappaStrategy, Launch, NeighborSampler, PartitionedDataModule, save_shards
from tests.data_fitting import trainer
from tests.graph.parted import some_partition
from tests.sage import SAGE
from tests.wire.test_channel import InTraining, check_stalled, small_graph


class OnShards(InTraining, SAGE):
    pass


def on_shards(rank: int, world_size: int, launch: Launch, folder: Path) -> None:
    data = PartitionedDataModule(folder, sampler=NeighborSampler([3, 3]), batch_size=16)
    strategy = GrappaStrategy(launch=launch)
    trainer(world_size, strategy, max_epochs=2, limit_val_batches=0).fit(OnShards(12, 4), data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    save_shards(small_graph(), some_partition(small_graph(), 3), tmp_path / "shards")
    check_stalled(on_shards, tmp_path / "shards")
