"""Reports time, bytes and metrics of a fit: in the progress bar, in a table at its end, and in a file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.callbacks.record import Measured, PartsRecord, RankRound, RunRecord
from lightning_gnn_dist.checks import check_folder, check_word, check_words, shown
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.rounds.lightning_internals.loops import log_numbers
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.collectives import Traffic

FIGURES = ("round", "MB_sent", "meetings_s", "data_s", "cut", "coverage")
_FETCHED = ("fetched_bytes", "cache_asked", "cache_hits")
_SECONDS_BETWEEN_WRITES = 10.0


class RunReport(Callback):
    """Reports what a fit costs: in the progress bar, in a table at its end, and in ``report.json``.

        trainer = pl.Trainer(..., callbacks=[RunReport()])

    For every rank and round, the file holds batches, seconds (training, waiting for data, meetings, validation) and
    bytes sent, of these the bytes at the boundary, and what was fetched and held of rows that lie in other shards or in
    files; also the metrics of every round, the edges between parts, and
    the parts' labels. ``lightning-gnn-dist report`` draws it. Rank 0 writes it during the fit, with its own figures,
    and at the end with those of all ranks. Loggers hear of the cut, and under every strategy of what the data module
    measures: ``data/waited_share``, ``data/waited_seconds``, ...

    At the start rank 0 reads all edges once, to count those that are cut. The ranks exchange nothing before the end.

    Args:
        path: The directory of the file. Default: that of the logger; without a logger nothing is written.
        progress_bar: The figures in the progress bar, out of ``round`` (of strategies that have any), ``MB_sent``,
            ``meetings_s`` and ``data_s`` (seconds that rank 0 spent in exchanges and waited for data), ``cut`` (share
            of the edges), ``coverage``. They are those of rank 0 in the table, and new at the end of each round.
        monitor: The metric of the table. Default: that of the fit's checkpoints or early stopping, otherwise the first
            whose name contains "acc", otherwise the first.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        progress_bar: Sequence[str] = ("round", "MB_sent", "meetings_s", "data_s"),
        monitor: str | None = None,
    ) -> None:
        check_words("progress_bar", progress_bar, '("round", "cut")')
        if monitor is not None:
            check_word("monitor", monitor, "val_acc")
        if unknown := [name for name in progress_bar if name not in FIGURES]:
            raise ValueError(f"progress_bar may name {list(FIGURES)}, got {shown(unknown)}.")
        self.path = None if path is None else check_folder("path", path)
        self.progress_bar = tuple(progress_bar)
        self.monitor = monitor
        self.record: RunRecord | None = None  # the record of the last fit, on rank 0
        self._begin()

    def _begin(self) -> None:
        self._rows: list[RankRound] = []
        self._measured: list[Measured] = []
        self._parts: PartsRecord | None = None
        self._start = self._round_start = self._validation_start = self._last_write = time.monotonic()
        self._validation_seconds, self._batches = 0.0, 0
        self._before_validation, self._sent_in_validation, self._stood_in_validation = Traffic(), 0.0, 0.0
        self._validates = self._validated = False
        self._sent = collectives.traffic.bytes_sent
        self._sent_at_boundary = collectives.traffic.boundary_bytes
        self._stood = collectives.traffic.seconds
        self._waited, self._fetched = 0.0, dict.fromkeys(_FETCHED, 0.0)

    # What Lightning calls.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._begin()  # before the replicas are made equal, whose bytes count, too
            if not _is_counted(trainer):  # otherwise the strategy does so
                collectives.traffic.begin_fit()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._parts = _parts_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._round_start, self._batches, self._validation_seconds = time.monotonic(), 0, 0.0
        self._stood_in_validation = 0.0
        self._stood, self._waited = collectives.traffic.seconds, _waited(trainer)
        self._validated = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._batches += 1
        if trainer.is_last_batch:
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_start, self._before_validation = time.monotonic(), replace(collectives.traffic)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Also those of the sanity check, which are sent before the first round and count in it.
        self._sent_in_validation += collectives.traffic.bytes_sent - self._before_validation.bytes_sent
        if not trainer.sanity_checking:
            self._validates = self._validated = True
            self._validation_seconds += time.monotonic() - self._validation_start
            self._stood_in_validation += collectives.traffic.seconds - self._before_validation.seconds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All ranks ask for the metrics, because asking reduces them over the ranks.
        metrics = trainer.callback_metrics
        known = {name: float(value) for name, value in metrics.items() if "/" not in name and name not in FIGURES}
        # Without a validation in this round, the metrics would be those of an earlier round.
        self._end_round(trainer, known if self._validated or not self._validates else {})
        self._show(trainer, pl_module)
        if time.monotonic() - self._last_write > _SECONDS_BETWEEN_WRITES:
            self._write(trainer, [(self._rows, _coverage(trainer))], finished=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and _is_counted(trainer):
            if self._batches:
                self._end_round(trainer, {})
            self._finish(trainer)  # the ranks have agreed to stop, so all come here
        elif self._rows:
            self._write(trainer, [(self._rows, _coverage(trainer))], finished=False)

    # What it does.

    def _log(self, trainer: Trainer, module: LightningModule) -> None:
        figures = {} if self._parts is None else {"partition/cut_ratio": self._parts.cut_ratio}
        if not isinstance(trainer.strategy, RoundStrategy | GrappaStrategy):  # which log them by themselves
            sent = collectives.traffic.figures.items()
            figures |= _figures(trainer) | {name: value for name, value in sent if name.startswith("comm/boundary")}
        log_numbers(module, figures)

    def _show(self, trainer: Trainer, module: LightningModule) -> None:
        """Put into the progress bar what the table says of this rank until now."""
        is_counted = _is_counted(trainer)
        bar = {
            "round": float(_round_of(trainer)) if isinstance(trainer.strategy, RoundStrategy) else None,
            "MB_sent": sum(row.bytes_sent or 0.0 for row in self._rows) / 1e6 if is_counted else None,
            "meetings_s": sum(row.meeting_seconds or 0.0 for row in self._rows) if is_counted else None,
            "data_s": sum(row.data_seconds for row in self._rows),
            "cut": None if self._parts is None else self._parts.cut_ratio,
            "coverage": _coverage(trainer),
        }
        shown = {name: value for name in self.progress_bar if (value := bar[name]) is not None}
        # With both of these flags, Lightning neither exchanges nor warns.
        flags: dict[str, Any] = {"sync_dist": True, "rank_zero_only": True, "on_step": False, "on_epoch": True}
        module.log_dict(shown, prog_bar=True, logger=False, batch_size=1, **flags)

    def _end_round(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        now, traffic, is_counted = time.monotonic(), collectives.traffic, _is_counted(trainer)
        row = RankRound(
            round_idx=_round_of(trainer),
            batches=self._batches,
            seconds=now - self._round_start,
            validation_seconds=self._validation_seconds,
            data_seconds=max(0.0, _waited(trainer) - self._waited),
            meeting_seconds=traffic.seconds - self._stood - self._stood_in_validation if is_counted else None,
            bytes_sent=traffic.bytes_sent - self._sent if is_counted else None,
            boundary_bytes=traffic.boundary_bytes - self._sent_at_boundary,
            validation_bytes=self._sent_in_validation if is_counted else 0.0,
            **self._fetched_since(trainer),
        )
        self._rows.append(row)
        self._measured.append(Measured(row.round_idx, now - self._start, dict(metrics)))
        self._sent, self._sent_at_boundary, self._batches = traffic.bytes_sent, traffic.boundary_bytes, 0
        self._sent_in_validation = 0.0

    def _fetched_since(self, trainer: Trainer) -> dict[str, float]:
        """Return what the round has fetched of rows that lie elsewhere; the figures count from the start of the fit."""
        before, figures = self._fetched, _figures(trainer)
        self._fetched = {name: figures.get(f"data/{name}", 0.0) for name in _FETCHED}
        return {name: max(0.0, value - before[name]) for name, value in self._fetched.items()}

    def _finish(self, trainer: Trainer) -> None:
        own = [asdict(row) for row in self._rows]
        gathered = collectives.gather_objects((own, _coverage(trainer)))
        if gathered is not None and self._rows:
            ranks = [([RankRound(**row) for row in rows], coverage) for rows, coverage in gathered]
            self._write(trainer, ranks, finished=True)
            rank_zero_info(f"\n{self.record}")

    def _write(self, trainer: Trainer, ranks: list[tuple[list[RankRound], float | None]], *, finished: bool) -> None:
        if not trainer.is_global_zero:
            return
        self._last_write = time.monotonic()
        rows, coverage = [rows for rows, _ in ranks], [share for _, share in ranks]
        self.record = RunRecord(
            strategy=_name_of_strategy(trainer),
            partitioner=_name_of_partitioner(trainer),
            num_ranks=trainer.world_size,
            finished=finished,
            monitor=self._monitored(trainer),
            ranks=rows,
            rounds=self._measured,
            parts=self._parts,
            coverage=coverage,
            estimated_by=_estimated_by(trainer),
            one_hop_more=getattr(getattr(trainer.datamodule, "exactness", None), "difference", None),  # type: ignore[attr-defined]
        )
        folder = self.path or _folder_of_logger(trainer)
        if folder is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            self.record.save(folder)

    def _monitored(self, trainer: Trainer) -> str | None:
        if self.monitor is not None:
            return self.monitor
        names = [name for measured in self._measured[-1:] for name in measured.metrics]
        names = names or [name for measured in self._measured for name in measured.metrics]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        wanted = [c.monitor for c in callbacks if isinstance(c, EarlyStopping | ModelCheckpoint) and c.monitor]
        accuracies = [name for name in names if "acc" in name.lower()]
        return next(iter([*wanted, *accuracies, *names]), None)


def _is_counted(trainer: Trainer) -> bool:
    """Whether ``collectives.traffic`` counts all that the strategy sends."""
    return isinstance(trainer.strategy, RoundStrategy | GrappaStrategy) or trainer.world_size == 1


def _round_of(trainer: Trainer) -> int:
    """The round that is ending, from 1."""
    strategy = trainer.strategy
    return strategy.state.round_idx if isinstance(strategy, RoundStrategy) else trainer.current_epoch + 1


def _figures(trainer: Trainer) -> dict[str, float]:
    """What a data module of this package measures; it counts from the start of the fit."""
    figures: dict[str, float] = getattr(trainer.datamodule, "figures", {})  # type: ignore[attr-defined]
    return figures


def _waited(trainer: Trainer) -> float:
    figures = _figures(trainer)
    return sum(figures.get(name, 0.0) for name in ("data/waited_seconds", "data/switch_waited_seconds"))


def _coverage(trainer: Trainer) -> float | None:
    return _figures(trainer).get("data/coverage")


def _parts_of(trainer: Trainer) -> PartsRecord | None:
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not hasattr(datamodule, "num_parts") or _is_in_shards(datamodule) or datamodule.num_parts == 1:
        return None
    return PartsRecord.of(datamodule.graph, datamodule.parts_of_ranks(datamodule.num_parts))


def _name_of_strategy(trainer: Trainer) -> str:
    clock = getattr(trainer.strategy, "clock", None)
    return type(trainer.strategy).__name__ + ("" if clock is None else f" with {clock}")


def _estimated_by(trainer: Trainer) -> str | None:
    evaluation = getattr(trainer.datamodule, "evaluation", None)  # type: ignore[attr-defined]
    sampler = getattr(evaluation, "sampler", None)
    return None if sampler is None else str(sampler)


def _is_in_shards(data: object) -> bool:
    return getattr(data, "shards_path", None) is not None


def _name_of_partitioner(trainer: Trainer) -> str:
    data = trainer.datamodule  # type: ignore[attr-defined]
    if _is_in_shards(data):
        return "as the shards were cut"
    partitioner = getattr(data, "partitioner", None)
    return type(partitioner).__name__ if isinstance(partitioner, Partition) else str(partitioner)


def _folder_of_logger(trainer: Trainer) -> Path | None:
    """The folder of the first logger, or None."""
    if not trainer.loggers:
        return None
    logger: Any = trainer.loggers[0]
    if getattr(logger, "log_dir", None) is not None:
        return Path(logger.log_dir)
    if logger.save_dir is None:
        return None
    return Path(logger.save_dir, str(logger.name), str(logger.version))
