"""A rank of eight holds an eighth: resident memory, measured on a graph of more than a gigabyte."""

from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Plan
from tests.data_fitting import trainer
from tests.memory import Peak, reads_memory, resident_bytes
from tests.ranks import run_ranks
from tests.sage import SAGE

NUM_NODES, NUM_FEATURES, RANKS = 1_100_000, 256, 8


pytestmark = [pytest.mark.slow, pytest.mark.alone, reads_memory]


def big_graph(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NUM_NODES, (2, 4 * NUM_NODES), generator=generator)
    arrays = {
        "x": torch.ones(NUM_NODES, NUM_FEATURES),
        "y": torch.randint(4, (NUM_NODES,), generator=generator),
        "train_mask": torch.arange(NUM_NODES) % 100 == 0,
    }
    lgd.Graph.from_edge_index(edge_index, NUM_NODES, arrays).save(path)


class Watch(pl.Callback):
    """Memory before anything is read, and while the part is there."""

    before = after = (0, 0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.before = resident_bytes("RssAnon"), resident_bytes("RssFile")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after = resident_bytes("RssAnon"), resident_bytes("RssFile")


def train(rank: int, world_size: int, path: str) -> tuple[int, int]:
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(3), launch=lgd.Launch(timeout=timedelta(seconds=30)))
    watch = Watch()
    sampler = lgd.NeighborSampler([10, 10])
    alone = {"partitioner": lgd.RandomPartitioner(), "boundary": lgd.Isolated()}
    data = lgd.PartitionedDataModule(path, sampler=sampler, batch_size=256, **alone)  # type: ignore[arg-type]
    trainer(world_size, strategy, limit_val_batches=0, callbacks=[watch]).fit(SAGE(NUM_FEATURES, 4), data)
    return watch.after[0] - watch.before[0], watch.after[1] - watch.before[1]


def test_a_rank_of_eight_holds_an_eighth_of_the_features(tmp_path: Path) -> None:
    big_graph(tmp_path / "graph")
    features = NUM_NODES * NUM_FEATURES * 4
    assert features > 1 << 30
    share = features / RANKS
    for anonymous, mapped in run_ranks(train, RANKS, str(tmp_path / "graph"), timeout=600):
        # Beside the share: edges and other arrays of the part, pooled buffers of batches, code that was loaded.
        assert share < anonymous < 1.25 * share + (150 << 20)
        assert mapped < 150 << 20


def read_with_halo(rank: int, world_size: int, path: str) -> tuple[int, int]:
    graph, boundary = lgd.Graph.open(path), lgd.Halo(2)
    data = lgd.PartitionedDataModule(graph, partitioner=lgd.RandomPartitioner(), boundary=boundary)
    reader = Parts(Plan(graph, data.partition(4), lgd.Holding(), 4, 0), 0, boundary, None)
    with Peak("RssAnon") as peak:
        part = reader.read(0).graph
    return part.num_edges, peak.added_bytes


def test_a_halo_is_read_in_pieces(tmp_path: Path) -> None:
    """Two copies of the edges at most, what pieces take, and no number of 8 bytes for each edge."""
    num_nodes, degree = 400_000, 50
    indptr = torch.arange(num_nodes + 1) * degree
    indices = torch.randint(num_nodes, (num_nodes * degree,), dtype=torch.int32)
    lgd.Graph(indptr, indices, {"x": torch.zeros(num_nodes, 1)}).save(tmp_path / "graph")
    ((num_edges, peak),) = run_ranks(read_with_halo, 1, str(tmp_path / "graph"))
    assert num_edges > 0.99 * indices.numel()
    assert peak < 12 * num_edges + (200 << 20)
