"""The record of a run: ``report.json``, and the table that a fit ends with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from lightning_gnn_dist.graph.storage.files import check_entries, is_a, read_json, write_whole

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.graph import Graph
    from lightning_gnn_dist.partition.base import Partition

Record = TypeVar("Record")
FILE_NAME = "report.json"
VERSION = 1
_ROUNDS_IN_TABLE = 10
_WAY_OUT = "Copy it again, or leave that run out."


@dataclass(frozen=True)
class RankRound:
    """What one rank did in one round, or in one epoch if the strategy has no rounds.

    Attributes:
        round_idx: The round, from 1.
        batches: Number of batches that it trained on.
        seconds: Seconds from the first batch to the end of the round, validation included.
        validation_seconds: Of these, seconds in validation.
        data_seconds: Of these, seconds of waiting for batches and for parts.
        meeting_seconds: Of these, seconds in exchanges with other ranks, mostly waiting for them, without exchanges
            during a backward pass and in validation; ``None`` if the strategy's exchanges are not counted.
        bytes_sent: Bytes that left this rank; ``None`` if the strategy's exchanges are not counted.
        validation_bytes: Of these, bytes that were sent in validation: rows of layers, and sums of metrics.
        boundary_bytes: Bytes of rows, and of their gradients, that left this rank at the boundary, with any strategy.
        fetched_bytes: Bytes of rows that batches took of other shards or of files.
        cache_asked: Rows that were looked for in the cache, of those that lie elsewhere, or on the device.
        cache_hits: Of these, rows that were held there.
    """

    round_idx: int
    batches: int
    seconds: float
    validation_seconds: float
    data_seconds: float
    meeting_seconds: float | None
    bytes_sent: float | None
    boundary_bytes: float = 0.0
    fetched_bytes: float = 0.0
    cache_asked: float = 0.0
    cache_hits: float = 0.0
    validation_bytes: float = 0.0

    @property
    def training_seconds(self) -> float:
        """The other seconds, those of the training itself."""
        others = self.validation_seconds + self.data_seconds + (self.meeting_seconds or 0.0)
        return max(0.0, self.seconds - others)


@dataclass(frozen=True)
class Measured:
    """The metrics that were logged at the end of a round, ``elapsed`` seconds after training began."""

    round_idx: int
    elapsed: float
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class PartsRecord:
    """The sizes, edges and labels of the ranks' parts in the first super-epoch.

    Attributes:
        nodes: Number of nodes of each part.
        edges: Number of edges from each part (row) to each part (column).
        classes: The labels of the training nodes.
        labels: Number of training nodes of each class (column) in each part (row).
    """

    nodes: list[int]
    edges: list[list[int]]
    classes: list[int] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: Graph, partition: Partition) -> PartsRecord:
        """Count them. Reads all edges twice."""
        # Here, as records of runs are read without torch.
        from lightning_gnn_dist.partition.partition_report import edges_between, labels_of_parts

        labels = labels_of_parts(graph, partition.assignment, partition.num_parts)
        classes, counts = ([], []) if labels is None else (labels[0].tolist(), labels[1].tolist())
        edges = edges_between(graph, partition.assignment, partition.num_parts)
        return cls(partition.counts().tolist(), edges.tolist(), classes, counts)

    @property
    def cut_ratio(self) -> float:
        """Edges between parts as a share of all edges."""
        inside = sum(row[part] for part, row in enumerate(self.edges))
        return 1 - inside / max(1, sum(map(sum, self.edges)))


@dataclass(frozen=True)
class RunRecord:
    """A run: its settings, what each rank did in each round, and the metrics.

    Attributes:
        strategy: The strategy, with its clock.
        partitioner: The partitioner that cut the graph.
        num_ranks: Number of ranks.
        finished: Whether all ranks came to the end together. If not, ``ranks`` holds rank 0 alone.
        monitor: The metric to look at first.
        ranks: The rounds of each rank.
        rounds: The metrics of each round.
        parts: The parts; ``None`` on one rank, or if the data module does not tell.
        coverage: For each rank, the mean coverage of its training nodes at the end, or ``None``.
        estimated_by: The sampler that drew neighbours for metrics, or ``None`` where they see all.
        one_hop_more: What one hop more makes of outputs, in parts of 1, or ``None`` where it changes nothing.
    """

    strategy: str
    partitioner: str
    num_ranks: int
    finished: bool
    monitor: str | None
    ranks: list[list[RankRound]]
    rounds: list[Measured]
    parts: PartsRecord | None = None
    coverage: list[float | None] = field(default_factory=list)
    estimated_by: str | None = None
    one_hop_more: float | None = None

    @property
    def estimates(self) -> list[str]:
        """A sentence that says why metrics are not exact, if they are not."""
        if self.estimated_by is not None:
            return [f"Metrics are estimates: {self.estimated_by} drew neighbours for them."]
        if self.one_hop_more is not None:
            changed = f"with one more hop, outputs differ by up to {self.one_hop_more:.1%}"
            return [f"Metrics are estimates: the model sees farther than the batches of an evaluation ({changed})."]
        return []

    @property
    def unit(self) -> str:
        """What a row of ``ranks`` stands for: a round of strategies that have a clock, an epoch of all others."""
        return "round" if " with " in self.strategy else "epoch"

    @property
    def bytes_sent(self) -> list[float] | None:
        """Bytes that all ranks had sent by the end of each round of rank 0; ``None`` if they are not counted."""
        by_rank = [{row.round_idx: row.bytes_sent for row in rows} for rows in self.ranks]
        if not self.ranks or any(sent is None for rows in by_rank for sent in rows.values()):
            return None
        return list(accumulate(sum(rows.get(r.round_idx) or 0.0 for rows in by_rank) for r in self.ranks[0]))

    @property
    def boundary_bytes(self) -> float:
        """Bytes that all ranks have sent at the boundary, a part of ``bytes_sent`` where that is known."""
        return sum(row.boundary_bytes for rows in self.ranks for row in rows)

    @property
    def fetched_bytes(self) -> float:
        """Bytes of rows that the batches of all ranks took of other shards or of files."""
        return sum(row.fetched_bytes for rows in self.ranks for row in rows)

    def of_metric(self, name: str | None) -> list[tuple[int, float, float]]:
        """The measurements of a metric: (round, elapsed seconds, value)."""
        points = [(m.round_idx, m.elapsed, m.metrics.get(name or "")) for m in self.rounds]
        return [(round_idx, elapsed, value) for round_idx, elapsed, value in points if value is not None]

    def save(self, folder: Path) -> None:
        """Write ``report.json``. A reader sees the old file or the new one, never half of it."""
        text = json.dumps({"version": VERSION, **_finite(asdict(self))}, allow_nan=False)
        write_whole(folder / FILE_NAME, text)

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read the record that :meth:`save` wrote into a folder."""
        path = folder / FILE_NAME
        if not path.exists():
            near = sorted(str(found.parent) for found in folder.glob(f"*/{FILE_NAME}"))
            way_out = f"Did you mean {near[-1]}?" if near else "RunReport writes one into the directory of a run."
            raise FileNotFoundError(f"{folder} has no {FILE_NAME}. {way_out}")
        content = read_json(path, _WAY_OUT)
        if content.pop("version", None) != VERSION:
            raise ValueError(f"{path} is not a report of version {VERSION}, which this package reads.")
        check_entries(
            content, {"ranks": list[list[object]], "rounds": list[object], "parts": dict | None}, path, _WAY_OUT
        )
        ranks = [[_built(RankRound, row, path) for row in rows] for rows in content["ranks"]]
        rounds = [_built(Measured, row, path) for row in content["rounds"]]
        parts = None if content["parts"] is None else _built(PartsRecord, content["parts"], path)
        record = _built(cls, content | {"ranks": [], "rounds": [], "parts": None}, path)
        return replace(record, ranks=ranks, rounds=rounds, parts=parts)

    def __str__(self) -> str:
        table = [list(line) for line in zip(*self._columns(), strict=True)]
        return "\n".join([self._heading(), *_aligned(table), *self._progress(), *self.estimates])

    def _heading(self) -> str:
        cut = f", {self.parts.cut_ratio:.1%} of the edges cut" if self.parts else ""
        known = [share for share in self.coverage if share is not None]
        covered = f", mean coverage {sum(known) / len(known):.2f}" if known else ""
        count = len(self.ranks[0]) if self.ranks else 0
        length = f"{_counted(self.num_ranks, 'rank')}, {_counted(count, self.unit)}"
        return f"{self.strategy}: {length}{cut}{covered}. Where the time went:"

    def _columns(self) -> Iterator[list[str]]:
        """Yield the columns of the table, each with its title: those on bytes only where there are some."""
        yield ["rank", *(str(rank) for rank, _ in enumerate(self.ranks))]
        yield ["batches", *(str(sum(row.batches for row in rows)) for rows in self.ranks)]
        for title, name in _SECONDS.items():
            seconds = [_total([getattr(row, name) for row in rows]) for rows in self.ranks]
            yield [title, *(total if total == _UNKNOWN else f"{total} s" for total in seconds)]
        yield ["MB sent", *(_total([row.bytes_sent for row in rows], 1e6) for rows in self.ranks)]
        for title, name in _BYTES.items():
            if any(getattr(row, name) for rows in self.ranks for row in rows):
                yield [title, *(_total([getattr(row, name) for row in rows], 1e6) for rows in self.ranks)]
        if any(row.cache_asked for rows in self.ranks for row in rows):
            yield ["held", *map(_share_held, self.ranks)]

    def _progress(self) -> list[str]:
        points = self.of_metric(self.monitor)
        if not points:
            return []
        step = math.ceil(len(points) / _ROUNDS_IN_TABLE)
        shown = points[(len(points) - 1) % step :: step]  # the last is among them
        sent = self.bytes_sent
        of_round = {} if sent is None else dict(zip([row.round_idx for row in self.ranks[0]], sent, strict=True))
        rows = [[self.unit, "after", "MB of all ranks", str(self.monitor)]]
        for round_idx, elapsed, value in shown:
            megabytes = f"{of_round[round_idx] / 1e6:.2f}" if round_idx in of_round else _UNKNOWN
            rows.append([str(round_idx), f"{elapsed:.1f} s", megabytes, f"{value:.4f}"])
        return _aligned(rows)


_UNKNOWN = "-"
_SECONDS = {  # of columns of the table, by title
    "training": "training_seconds",
    "data": "data_seconds",
    "meetings": "meeting_seconds",
    "validation": "validation_seconds",
}
_BYTES = {"in validation": "validation_bytes", "MB at boundary": "boundary_bytes", "MB fetched": "fetched_bytes"}


def _built(kind: type[Record], content: Any, path: Path) -> Record:
    """A record of a file's entries; refuse missing and unknown ones, wrong types and negative numbers."""
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    needed = {name for name, entry in known.items() if entry.default is MISSING and entry.default_factory is MISSING}
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in needed or name in content}
    check_entries(content, hints, path, _WAY_OUT)
    for name, value in content.items():
        if is_a(float, value) and value < 0:
            raise ValueError(f"{path} is damaged (the entry {name!r} is {value}, which is negative). {_WAY_OUT}")
    if unknown := sorted(content.keys() - known):
        raise ValueError(f"{path} is damaged (nothing is called {unknown[0]!r:.60}). {_WAY_OUT}")
    return kind(**content)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _total(values: list[float | None], unit: float = 1.0) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / unit:.2f}" if len(known) == len(values) else _UNKNOWN


def _share_held(rows: list[RankRound]) -> str:
    """The share of the rows looked for in a rank's cache that were there."""
    asked, hits = sum(row.cache_asked for row in rows), sum(row.cache_hits for row in rows)
    return f"{hits / asked:.0%}" if asked else _UNKNOWN


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(content) for key, content in value.items()}
    if isinstance(value, list):
        return [_finite(content) for content in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
