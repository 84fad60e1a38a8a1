"""The table at the end of a fit: what each rank has done, and where its time went."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.rounds.lightning_internals import log_numbers
from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.wire import collectives

_SECONDS, _MEGABYTES = (1.0, "{:.2f} s"), (1e6, "{:.2f}")  # what a figure is divided by, and how it is shown
_COLUMNS = {  # of the table: the figure that each shows, how, and whether it stands there with zeros alone
    "batches": ("batches", (1.0, "{:.0f}"), True),
    "training": ("training_seconds", _SECONDS, True),
    "data": ("data_seconds", _SECONDS, True),
    "meetings": ("meeting_seconds", _SECONDS, True),
    "validation": ("validation_seconds", _SECONDS, True),
    "MB sent": ("bytes_sent", _MEGABYTES, True),
    "in validation": ("validation_bytes", _MEGABYTES, False),
    "MB at boundary": ("boundary_bytes", _MEGABYTES, False),
    "MB fetched": ("fetched_bytes", _MEGABYTES, False),
    "held": ("held", (1.0, "{:.0%}"), False),
}
_SHARES = ("held", "coverage")  # which have no sum over ranks


class RunReport(Callback):
    """Ends a fit with a table of what each rank has done, and sends its figures to the loggers.

        trainer = pl.Trainer(..., callbacks=[RunReport()])

    The table has batches, seconds (training, waiting for data, meetings, validation) and bytes sent, of these the bytes
    in validation and at the boundary, and what was fetched and held of rows that lie in other shards or in files. What
    a strategy of another package sends is not known. All loggers get sums over the ranks at the end
    (``report/training_seconds``, ``report/bytes_sent``, ...), and in each epoch, under any strategy, the cut and what
    the data module measures: ``partition/cut_ratio``, ``data/waited_share``, ``data/waited_seconds``, ...

    At the start rank 0 reads all edges once, to count those that are cut. The ranks exchange nothing before the end.

    Attributes:
        table: The table of the last fit, on rank 0.
        ranks: Its figures, by name, for each rank.
    """

    def __init__(self) -> None:
        self.table, self.ranks = "", list[dict[str, float]]()
        self._begin()

    def _begin(self) -> None:
        self._spent = defaultdict[str, float](float)
        self._cut_ratio: float | None = None
        self._start, self._stood = time.monotonic(), 0.0
        self._validation = self._start, collectives.traffic  # when one began, and what had been sent by then

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._begin()
            if not isinstance(trainer.strategy, PartitionedStrategy):  # which has done so
                collectives.traffic.begin_fit()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "parts_of_ranks") or data.shards_path is not None or data.num_parts == 1:
            return
        if trainer.is_global_zero:
            self._cut_ratio = data.parts_of_ranks(data.num_parts).report(data.graph).cut_ratio

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start, self._stood = time.monotonic(), collectives.traffic.seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._spent["batches"] += 1
        if not trainer.is_last_batch:
            return
        figures = {} if self._cut_ratio is None else {"partition/cut_ratio": self._cut_ratio}
        if not isinstance(trainer.strategy, PartitionedStrategy):  # which logs them by itself
            sent = collectives.traffic.figures.items()
            figures |= _of_data(trainer) | {name: value for name, value in sent if name.startswith("comm/boundary")}
        log_numbers(pl_module, figures)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = time.monotonic(), replace(collectives.traffic)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start, before = self._validation
        self._spent["validation_bytes"] += collectives.traffic.bytes_sent - before.bytes_sent
        if not trainer.sanity_checking:
            self._spent["validation_seconds"] += time.monotonic() - start
            self._spent["stood"] += collectives.traffic.seconds - before.seconds

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and _is_counted(trainer):
            self._finish(trainer)  # the ranks have agreed to stop, so all come here

    def _finish(self, trainer: Trainer) -> None:
        """Gather the figures of all ranks, which all come here; show and log them."""
        self.ranks = collectives.gather_objects(self._figures(trainer)) or []
        if not any(rank["batches"] for rank in self.ranks):
            return
        sums = {name: sum(rank[name] for rank in self.ranks) for name in self.ranks[0] if name not in _SHARES}
        for logger in trainer.loggers:
            logger.log_metrics({f"report/{name}": value for name, value in sums.items()}, step=trainer.global_step)
        self.table = "\n".join([self._heading(trainer), *_aligned(self.ranks)])
        rank_zero_info(f"\n{self.table}")

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        """What this rank has done."""
        data, sent, spent = _of_data(trainer), collectives.traffic.figures, self._spent
        waited = sum(data.get(name, 0.0) for name in ("data/waited_seconds", "data/switch_waited_seconds"))
        figures = {
            "batches": spent["batches"],
            "data_seconds": waited,
            "validation_seconds": spent["validation_seconds"],
            "boundary_bytes": sent.get("comm/boundary_bytes", 0.0),
            "fetched_bytes": data.get("data/fetched_bytes", 0.0),
        }
        if _is_counted(trainer):
            figures["meeting_seconds"] = collectives.traffic.seconds - self._stood - spent["stood"]
            figures |= {"bytes_sent": sent["comm/bytes_sent"], "validation_bytes": spent["validation_bytes"]}
        others = sum(value for name, value in figures.items() if name.endswith("_seconds"))
        figures["training_seconds"] = max(0.0, time.monotonic() - self._start - others)
        optional = {"held": data.get("data/cache_hit_rate"), "coverage": data.get("data/coverage")}
        return figures | {name: value for name, value in optional.items() if value is not None}

    def _heading(self, trainer: Trainer) -> str:
        clock = getattr(trainer.strategy, "clock", None)
        facts = [f"{type(trainer.strategy).__name__}{'' if clock is None else f' with {clock}'}"]
        facts.append(f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}")
        if self._cut_ratio is not None:
            facts.append(f"{self._cut_ratio:.1%} of the edges cut")
        if known := [rank["coverage"] for rank in self.ranks if "coverage" in rank]:
            facts.append(f"mean coverage {sum(known) / len(known):.2f}")
        return f"{', '.join(facts)}. Where the time went:"


def _is_counted(trainer: Trainer) -> bool:
    """Whether ``collectives.traffic`` counts all that the strategy sends."""
    return isinstance(trainer.strategy, PartitionedStrategy) or trainer.world_size == 1


def _of_data(trainer: Trainer) -> dict[str, float]:
    """What a data module of this package measures; it counts from the start of the fit."""
    figures: dict[str, float] = getattr(trainer.datamodule, "figures", {})  # type: ignore[attr-defined]
    return figures


def _aligned(ranks: list[dict[str, float]]) -> list[str]:
    """The lines of the table."""
    columns = [["rank", *map(str, range(len(ranks)))]]
    for title, (name, (unit, text), stays) in _COLUMNS.items():
        if any(rank.get(name) for rank in ranks) or (name in ranks[0] and stays):
            values = [rank.get(name) for rank in ranks]
            columns.append([title, *("-" if value is None else text.format(value / unit) for value in values)])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
