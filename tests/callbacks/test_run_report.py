"""What a fit costs, told as it is: batches, bytes, metrics and parts, by rank and round."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from lightning_gnn_dist import (
    Evaluation,
    EverySteps,
    Exchange,
    GrappaStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    RunReport,
    WholePartSampler,
    communities,
    save_shards,
)
from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.wire import collectives
from tests.boundary.models import model, weighted_data
from tests.data_fitting import trainer
from tests.layers.models import graph_of
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

MODEL_BYTES = 4 * sum(parameter.numel() for parameter in SAGE(8, 4).parameters())


def data_module(**options: Any) -> PartitionedDataModule:
    graph, sampler = communities(400, 4, num_features=8), NeighborSampler([3, 3])
    return PartitionedDataModule(graph, partitioner=RandomPartitioner(), sampler=sampler, batch_size=16, **options)


def fit(
    folder: Path,
    world_size: int,
    strategy: Any,
    callbacks: list[Callback],
    data: Any = None,
    module: Any = None,
    **options: Any,
) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    told = {"logger": CSVLogger(folder), "log_every_n_steps": 1, "callbacks": callbacks, "max_epochs": 3}
    running = trainer(world_size, strategy, **(told | options))
    running.fit(module or SAGE(8, 4), data or data_module())
    return running


def fit_in_rounds(rank: int, world_size: int, folder: Path) -> RunRecord | None:
    report = RunReport()
    fit(folder, world_size, LocalSGDStrategy(EverySteps(5)), [report])
    return report.record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def record(folder: Path) -> Any:
    on_rank_0, elsewhere = run_ranks(fit_in_rounds, 2, folder)
    assert elsewhere is None
    return on_rank_0


def test_it_says_where_metrics_are_estimates(tmp_path: Path, record: RunRecord) -> None:
    report, data = RunReport(), data_module(evaluation=Evaluation(sampler=NeighborSampler([2, 2])))
    fit(tmp_path, 1, LocalSGDStrategy(), [report], data, max_epochs=1)
    assert report.record is not None and report.record.estimated_by == str(NeighborSampler([2, 2]))
    assert "Metrics are estimates" in str(report.record) and "estimates" not in str(record)


def test_every_rank_and_round_is_in_the_file(folder: Path, record: RunRecord) -> None:
    assert record == RunRecord.load(folder / "lightning_logs" / "version_0")
    assert record.finished and record.num_ranks == 2 and record.monitor == "accuracy"
    assert record.strategy == "LocalSGDStrategy with EverySteps(steps=5, growth=1.0, limit=None)"
    assert record.partitioner == "RandomPartitioner()"
    assert [[(row.round_idx, row.batches) for row in rows] for rows in record.ranks] == [[(1, 5), (2, 5), (3, 5)]] * 2
    assert all(row.validation_seconds > 0 and row.meeting_seconds for rows in record.ranks for row in rows)
    assert all(row.seconds >= row.validation_seconds + row.meeting_seconds for rows in record.ranks for row in rows)
    times = [elapsed for _, elapsed, _ in record.of_metric("accuracy")]
    assert len(times) == 3 and times == sorted(times)
    # A meeting of two ranks moves one model from each, and the start half a one; what is agreed on is small.
    assert record.bytes_sent is not None
    assert 0 < record.bytes_sent[-1] - 2 * 3.5 * MODEL_BYTES < 1500


def test_the_parts_are_described_as_the_partition_has_them(record: RunRecord) -> None:
    assert record.parts is not None and record.coverage[0] is not None
    data = data_module()
    partition = data.partition(2)
    report = partition.report(data.graph)
    assert record.parts.nodes == report.nodes.tolist()
    assert torch.tensor(record.parts.edges).diag().tolist() == report.inside_edges.tolist()
    assert record.parts.cut_ratio == pytest.approx(report.cut_ratio)
    train = data.graph.split("train")
    counts = torch.zeros(2, 4, dtype=torch.long)
    for node in train.tolist():
        counts[partition.assignment[node], data.graph.node_arrays["y"][node]] += 1
    assert record.parts.labels == counts.tolist() and record.parts.classes == [0, 1, 2, 3]
    part = data.part(0, 2)
    assert record.coverage[0] == pytest.approx(float(part.node_arrays["coverage"][part.split("train")].mean()))


def test_any_logger_hears_of_the_cut_and_the_coverage(folder: Path, record: RunRecord) -> None:
    assert record.parts is not None
    (metrics,) = folder.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(metrics.read_text().splitlines()) if row["partition/cut_ratio"]]
    assert len(rows) == 3
    assert float(rows[0]["partition/cut_ratio"]) == pytest.approx(record.parts.cut_ratio, abs=1e-6)
    assert float(rows[0]["data/coverage"]) == pytest.approx(record.coverage[0], abs=1e-6)
    assert {"comm/bytes_sent", "comm/seconds", "data/waited_seconds"} <= rows[0].keys()


def fit_grappa(rank: int, world_size: int, folder: Path) -> tuple[RunRecord | None, int]:
    report = RunReport(folder / "mine")
    trainer = fit(folder, world_size, GrappaStrategy(), [report], check_val_every_n_epoch=2)
    return report.record, trainer.global_step


def test_gradients_are_counted_too_and_an_epoch_without_validation_has_no_metrics(tmp_path: Path) -> None:
    (record, steps), _ = run_ranks(fit_grappa, 2, tmp_path)
    assert record == RunRecord.load(tmp_path / "mine")
    assert [bool(measured.metrics) for measured in record.rounds] == [False, True, False]
    sent = 2 * steps * (MODEL_BYTES + 5 * 8) + 2 * MODEL_BYTES  # of the start, which settles DDP's buckets
    assert sent <= record.bytes_sent[-1] <= sent + 400  # and what ranks compare at the start, and at an epoch's end


def fit_ddp(rank: int, world_size: int, folder: Path) -> RunRecord | None:
    report = RunReport()
    fit(folder, world_size, "ddp", [report])
    return report.record


def test_what_another_strategy_sends_is_not_known(tmp_path: Path) -> None:
    record, _ = run_ranks(fit_ddp, 2, tmp_path)
    assert record.bytes_sent is None and record.ranks[1][0].meeting_seconds is None
    assert record.parts is not None and len(record.rounds) == 3


def fit_with_exchange(rank: int, world_size: int, folder: Path, strategy: Any) -> RunRecord | None:
    data = PartitionedDataModule(
        graph_of(weighted_data()), partitioner=RandomPartitioner(), sampler=WholePartSampler(2), boundary=Exchange()
    )
    report = RunReport(monitor="loss")
    fit(folder, world_size, strategy, [report], data, model("SAGE", 2), precision="64-true")
    return report.record


@pytest.mark.parametrize("strategy", [pytest.param("grappa", marks=pytest.mark.slow), "ddp"])
def test_rows_at_the_boundary_are_told_apart(strategy: str, tmp_path: Path) -> None:
    record, _ = run_ranks(fit_with_exchange, 2, tmp_path, strategy)
    steps = [row.boundary_bytes for rows in record.ranks for row in rows]
    assert min(steps) > 0 and len(set(steps[:3])) == len(set(steps[3:])) == 1  # each step sends as much
    assert sum(steps) == record.boundary_bytes
    assert record.bytes_sent is None if strategy == "ddp" else record.bytes_sent[-1] > record.boundary_bytes
    (metrics,) = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(metrics.read_text().splitlines()) if row.get("comm/boundary_bytes")]
    assert [float(row["comm/boundary_bytes"]) for row in rows] == [steps[0], 2 * steps[0], 3 * steps[0]]
    assert all(row.get("comm/bytes_sent") for row in rows) == (strategy == "grappa")


class Bar(Callback):
    """What a progress bar would show."""

    shown: dict[str, Any]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shown = dict(trainer.progress_bar_metrics)


class Sends(SAGE):
    """Sends 40 bytes in each validation, to the one other rank."""

    def on_validation_epoch_end(self) -> None:
        collectives.all_gather_rows(torch.zeros(10))


def show(rank: int, world_size: int, folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    bar, report = Bar(), RunReport(progress_bar=names)
    strategy, options = LocalSGDStrategy(EverySteps(5)), {"max_epochs": 2, "num_sanity_val_steps": 1}
    fit(folder, world_size, strategy, [report, bar], module=Sends(8, 4), **options)
    return bar.shown, report.record


def test_the_progress_bar_shows_what_was_asked_for(tmp_path: Path) -> None:
    (shown, record), _ = run_ranks(show, 2, tmp_path, ("round", "MB_sent", "cut", "coverage"))
    assert {"round", "MB_sent", "cut", "coverage"} <= shown.keys() and "data_s" not in shown
    assert shown["round"] == 2.0 and 0 < shown["MB_sent"] < 0.1 and 0 < shown["cut"] < 1
    sent = sum(row.bytes_sent for row in record.ranks[0])
    assert shown["MB_sent"] == pytest.approx(sent / 1e6)  # also what the validation of the last round has sent
    assert [row.validation_bytes for row in record.ranks[0]] == [80.0, 40.0]  # the first has the sanity check's, too


def test_one_process_needs_no_parts(tmp_path: Path) -> None:
    report = RunReport(monitor="something_else")
    fit(tmp_path, 1, "auto", [report])
    assert report.record is not None and report.record.parts is None and report.record.bytes_sent == [0.0] * 3
    assert report.record.monitor == "something_else"
    assert str(report.record).count("\n") == 2  # nothing was measured by this name


def test_nobody_cuts_shards_again(tmp_path: Path) -> None:
    graph, report = communities(400, 4, num_features=8), RunReport()
    save_shards(graph, RandomPartitioner()(graph, 1, 0), tmp_path / "shards")
    data = PartitionedDataModule(tmp_path / "shards", sampler=NeighborSampler([3, 3]), batch_size=16)
    fit(tmp_path, 1, LocalSGDStrategy(EverySteps(2)), [report], data, max_epochs=1)
    assert report.record is not None and report.record.partitioner == "as the shards were cut"


def test_the_metric_that_stops_the_fit_is_shown(tmp_path: Path) -> None:
    report = RunReport()
    fit(tmp_path, 1, "auto", [report, EarlyStopping("val_loss", patience=9, strict=False)], max_epochs=1)
    assert report.record is not None and report.record.monitor == "val_loss"


class Fate(Callback):
    """What happens to one rank in its second round."""

    def __init__(self, rank: int, sends: int | None) -> None:
        self.rank, self.sends = rank, sends

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            if self.sends is None:
                raise OSError("the disk is full")
            os.kill(os.getpid(), self.sends)


def meet_fate(rank: int, world_size: int, folder: Path, fate: Fate) -> RunRecord | None:
    report = RunReport()
    try:
        fit(folder, world_size, LocalSGDStrategy(EverySteps(5)), [report, fate])
    except SystemExit:  # Lightning's, after SIGTERM
        return report.record
    raise AssertionError("the fit should not have come to its end")


def test_a_fit_that_is_preempted_tells_of_all_ranks(tmp_path: Path) -> None:
    record, _ = run_ranks(meet_fate, 2, tmp_path, Fate(1, signal.SIGTERM))
    assert record.finished and [len(rows) for rows in record.ranks] == [2, 2]
    assert record == RunRecord.load(tmp_path / "lightning_logs" / "version_0")


def test_a_fit_that_fails_leaves_what_rank_0_knows(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the disk is full"):
        run_ranks(meet_fate, 2, tmp_path, Fate(0, None))
    record = RunRecord.load(tmp_path / "lightning_logs" / "version_0")
    assert not record.finished and [len(rows) for rows in record.ranks] == [1] and record.num_ranks == 2
