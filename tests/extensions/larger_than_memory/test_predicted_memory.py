"""What a rank takes is what is predicted, measured."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.larger_than_memory.memory import Needs
from lightning_gnn_dist.graph.graph import bytes_of_part
from tests.data_fitting import trainer
from tests.memory import Peak, reads_memory
from tests.ranks import run_ranks
from tests.sage import SAGE

pytestmark = [pytest.mark.slow, pytest.mark.alone, reads_memory]


def middle_graph(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(1_000_000, (2, 10_000_000), generator=generator)
    x, mask = torch.randn(1_000_000, 64, generator=generator), torch.arange(1_000_000) % 50 == 0
    arrays = {"x": x, "y": torch.randint(4, (1_000_000,), generator=generator), "train_mask": mask}
    lgd.Graph.from_edge_index(edge_index, 1_000_000, arrays).save(path)


def measure_peak(rank: int, world_size: int, path: str) -> int:
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(3), launch=lgd.Launch(timeout=timedelta(seconds=30)))
    sampler = lgd.NeighborSampler([10, 5])
    alone = {"partitioner": lgd.RandomPartitioner(), "boundary": lgd.Isolated()}
    data = lgd.PartitionedDataModule(path, sampler=sampler, batch_size=512, **alone)  # type: ignore[arg-type]
    with Peak("RssAnon") as peak:
        trainer(world_size, strategy, limit_val_batches=0).fit(SAGE(64, 4), data)
    return peak.added_bytes


def test_a_rank_takes_no_more_than_is_predicted(tmp_path: Path) -> None:
    middle_graph(tmp_path / "graph")
    graph = lgd.Graph.open(tmp_path / "graph")
    report = lgd.RandomPartitioner()(graph, 2, 0).report(graph)
    of_part = bytes_of_part(graph, report.nodes, report.inside_edges)
    settings = lgd.PartitionedDataModule(
        graph, sampler=lgd.NeighborSampler([10, 5]), batch_size=512
    )._home.running.settings
    least, most = int(of_part.min()), Needs.of_part(graph, int(of_part.max()), settings).of_rank
    for peak in run_ranks(measure_peak, 2, str(tmp_path / "graph"), timeout=600):
        assert least < peak < most
        assert peak > 0.5 * most  # and not much less
