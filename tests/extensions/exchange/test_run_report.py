"""The report of a run tells rows at the boundary apart."""

from pathlib import Path
from typing import Any

import pytest

import lightning_gnn_dist as lgd
from tests.boundary.models import model, weighted_data
from tests.callbacks.test_run_report import Told, fit, logged
from tests.layers.models import graph_of
from tests.ranks import run_ranks


def fit_with_exchange(rank: int, world_size: int, folder: Path, strategy: Any) -> Told:
    data = lgd.PartitionedDataModule(
        graph_of(weighted_data()),
        partitioner=lgd.RandomPartitioner(),
        sampler=lgd.WholePartSampler(2),
        boundary=lgd.Exchange(),
    )
    report = lgd.RunReport()
    fit(folder, world_size, strategy, [report], data, model("SAGE", 2), precision="64-true")
    return report.ranks, report.table


@pytest.mark.parametrize("strategy", [pytest.param("grappa", marks=pytest.mark.slow), "ddp"])
def test_rows_at_the_boundary_are_told_apart(strategy: str, tmp_path: Path) -> None:
    (ranks, table), _ = run_ranks(fit_with_exchange, 2, tmp_path, strategy)
    assert "MB at boundary" in table and min(rank["boundary_bytes"] for rank in ranks) > 0
    assert strategy == "ddp" or all(rank["bytes_sent"] > rank["boundary_bytes"] for rank in ranks)
    step, *_ = steps = logged(tmp_path, "comm/boundary_bytes")
    assert steps == [step, 2 * step, 3 * step] and ranks[0]["boundary_bytes"] == steps[-1]
    assert bool(logged(tmp_path, "comm/bytes_sent")) == (strategy == "grappa")
