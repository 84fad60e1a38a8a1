"""What a fit has cost is told as it is: batches, seconds and bytes of each rank, in a table and to any logger."""

import csv
import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

import lightning_gnn_dist as lgd
from lightning_gnn_dist.wire import collectives
from tests.data_fitting import trainer
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

MODEL_BYTES = 4 * sum(parameter.numel() for parameter in SAGE(8, 4).parameters())
Told = tuple[list[dict[str, float]], str]
ROUNDS = lgd.LocalSGDStrategy(lgd.EverySteps(5))


def data_module(**options: Any) -> lgd.PartitionedDataModule:
    graph, sampler = lgd.communities(400, 4, num_features=8), lgd.NeighborSampler([3, 3])
    return lgd.PartitionedDataModule(
        graph, partitioner=lgd.RandomPartitioner(), sampler=sampler, batch_size=16, **options
    )


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


def logged(folder: Path, name: str) -> list[float]:
    (metrics,) = folder.rglob("metrics.csv")
    return [float(row[name]) for row in csv.DictReader(metrics.read_text().splitlines()) if row.get(name)]


def fit_with(rank: int, world_size: int, folder: Path, strategy: Any, options: dict[str, Any]) -> Told:
    report = lgd.RunReport()
    fit(folder, world_size, strategy, [report], **options)
    return report.ranks, report.table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def told(folder: Path) -> Told:
    on_rank_0, elsewhere = run_ranks(fit_with, 2, folder, ROUNDS, {})
    assert elsewhere == ([], "")
    return on_rank_0


def test_rank_0_knows_what_all_ranks_have_done(told: Told) -> None:
    ranks, _ = told
    assert [rank["batches"] for rank in ranks] == [15, 15]
    assert all(rank["validation_seconds"] > 0 < rank["meeting_seconds"] for rank in ranks)
    # A meeting of two ranks moves one model from each, and the start half a one; what is agreed on is small.
    assert 0 < sum(rank["bytes_sent"] for rank in ranks) - 2 * 3.5 * MODEL_BYTES < 1500


def test_the_table_has_a_line_for_each_rank_and_no_columns_of_zeros(told: Told) -> None:
    ranks, table = told
    heading, titles, *lines = table.splitlines()
    assert heading.startswith("LocalSGDStrategy with EverySteps(steps=5, growth=1.0, limit=None), 2 ranks, ")
    assert re.search(r", \d\d\.\d% of the edges cut, mean coverage [01]\.\d\d\. Where the time went:$", heading)
    assert re.split("  +", titles) == ["rank", "batches", "training", "data", "meetings", "validation", "MB sent"]
    for number, (line, rank) in enumerate(zip(lines, ranks, strict=True)):
        cells = re.split("  +", line.strip())
        assert cells[:2] == [str(number), "15"] and cells[-1] == f"{rank['bytes_sent'] / 1e6:.2f}"
        assert cells[2] == f"{rank['training_seconds']:.2f} s"


def test_loggers_have_the_sums_over_the_ranks(folder: Path, told: Told) -> None:
    (metrics,) = folder.rglob("metrics.csv")
    for name in told[0][0].keys() - {"coverage"}:
        assert logged(folder, f"report/{name}") == pytest.approx([sum(rank[name] for rank in told[0])], rel=1e-6)
    assert "report/coverage" not in metrics.read_text()


def test_any_logger_hears_of_the_cut_and_the_coverage(folder: Path, told: Told) -> None:
    data = data_module()
    report = data.partition(2).report(data.graph)
    assert logged(folder, "partition/cut_ratio") == pytest.approx([report.cut_ratio] * 3, abs=1e-6)
    part = data.part(0, 2)
    coverage = float(part.node_arrays["coverage"][part.split("train")].mean())
    assert told[0][0]["coverage"] == pytest.approx(coverage)
    assert logged(folder, "data/coverage") == pytest.approx([coverage] * 3, abs=1e-6)
    assert all(len(logged(folder, name)) == 3 for name in ("comm/bytes_sent", "comm/seconds", "data/waited_seconds"))


def test_gradients_are_counted_too(tmp_path: Path) -> None:
    (ranks, _), _ = run_ranks(fit_with, 2, tmp_path, lgd.GrappaStrategy(), {"check_val_every_n_epoch": 2})
    # Of each step, and of the start, which settles DDP's buckets.
    sent = 2 * ranks[0]["batches"] * (MODEL_BYTES + 5 * 8) + 2 * MODEL_BYTES
    # And what ranks compare at the start, and at an epoch's end.
    assert sent <= sum(rank["bytes_sent"] for rank in ranks) <= sent + 800


def test_what_another_strategy_sends_is_not_known(tmp_path: Path) -> None:
    (ranks, table), _ = run_ranks(fit_with, 2, tmp_path, "ddp", {})
    assert not {"bytes_sent", "meeting_seconds"} & (ranks[0].keys() | ranks[1].keys())
    assert re.split("  +", table.splitlines()[1]) == ["rank", "batches", "training", "data", "validation"]
    assert len(logged(tmp_path, "partition/cut_ratio")) == 3


class Sends(SAGE):
    """Sends 40 bytes in each validation, to the one other rank."""

    def on_validation_epoch_end(self) -> None:
        collectives.all_gather_rows(torch.zeros(10))


def test_bytes_of_validations_are_told_apart(tmp_path: Path) -> None:
    options = {"module": Sends(8, 4), "max_epochs": 2, "num_sanity_val_steps": 1}
    (ranks, table), _ = run_ranks(fit_with, 2, tmp_path, ROUNDS, options)
    assert [rank["validation_bytes"] for rank in ranks] == [120.0] * 2  # that before the first round is one of three
    assert "in validation" in table


def test_one_process_has_no_parts_and_each_fit_its_own_figures(tmp_path: Path) -> None:
    report = lgd.RunReport()
    for _ in range(2):
        fit(tmp_path, 1, "auto", [report], max_epochs=1)
        ((rank,), heading) = report.ranks, report.table.splitlines()[0]
        assert heading == "SingleDeviceStrategy, 1 rank. Where the time went:"
        assert rank["bytes_sent"] == 0.0 and rank["batches"] == 3


class Fate(Callback):
    """What happens to one rank in its second round."""

    def __init__(self, rank: int, sends: int | None) -> None:
        self.rank, self.sends = rank, sends

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            if self.sends is None:
                raise OSError("the disk is full")
            os.kill(os.getpid(), self.sends)


def meet_fate(rank: int, world_size: int, folder: Path, fate: Fate) -> Told:
    report = lgd.RunReport()
    try:
        fit(folder, world_size, ROUNDS, [report, fate])
    except SystemExit:  # Lightning's, after SIGTERM
        return report.ranks, report.table
    raise AssertionError("the fit should not have come to its end")


def test_a_fit_that_is_preempted_tells_of_all_ranks(tmp_path: Path) -> None:
    (ranks, table), _ = run_ranks(meet_fate, 2, tmp_path, Fate(1, signal.SIGTERM))
    assert [rank["batches"] for rank in ranks] == [10, 10] and len(table.splitlines()) == 4
    assert len(logged(tmp_path, "report/batches")) == 1


def test_a_fit_that_fails_leaves_what_loggers_have_heard(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the disk is full"):
        run_ranks(meet_fate, 2, tmp_path, Fate(0, None))
    assert len(logged(tmp_path, "comm/bytes_sent")) == 1 and logged(tmp_path, "report/batches") == []
