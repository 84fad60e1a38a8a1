"""The charts of runs as data, before they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from lightning_gnn_dist.callbacks.record import PartsRecord, RankRound, RunRecord

MAX_COLUMNS = 120  # of a heat map; of more rounds, several share a column
MAX_CLASSES = 12  # pieces of a bar; of more classes, the rarest are one piece


@dataclass(frozen=True)
class Line:
    """A named curve."""

    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Lines:
    """Several curves over one axis, which has whole numbers alone if it ``counts`` rounds or epochs."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    counts: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A table whose numbers are drawn as colours. ``cells`` has a list for each row; None is an empty cell.

    ``as_share`` is true if the numbers lie between 0 and 1.
    """

    title: str
    x_label: str
    y_label: str
    columns: list[str]
    rows: list[str]
    cells: list[list[float | None]]
    as_share: bool


@dataclass(frozen=True)
class Bars:
    """A bar for each row, made of named pieces. ``lengths`` has a list for each row, with a number for each piece.

    A piece that is named as the unit is the only one, and needs no legend. With ``totals`` the length of each bar
    stands behind it.
    """

    title: str
    unit: str
    pieces: list[str]
    rows: list[str]
    lengths: list[list[float]]
    totals: bool = False

    @property
    def legend(self) -> list[str]:
        """The pieces to explain."""
        return [] if self.pieces == [self.unit] else self.pieces


Chart = Lines | HeatMap | Bars


def of_all(records: Mapping[str, RunRecord], metric: str) -> list[Lines]:
    """The charts that compare runs: the metric over time, over bytes, and over rounds or epochs."""
    over_time, over_bytes, over_rounds = [], [], []
    sent = {name: _megabytes_by_round(record) for name, record in records.items()}
    most = max((total for totals in sent.values() for total in totals.values()), default=0.0)
    for name, record in records.items():
        points = record.of_metric(metric)
        over_time.append(Line(name, [(elapsed, value) for _, elapsed, value in points]))
        over_rounds.append(Line(name, [(float(round_idx), value) for round_idx, _, value in points]))
        if sent[name]:
            against = [(sent[name][at], value) for at, _, value in points if at in sent[name]]
            if record.num_ranks == 1:  # it sends nothing: a level to compare the others with
                against = [(end, against[-1][1]) for end in (0.0, most)] if against else []
            over_bytes.append(Line(name, against))
    unit = unit_of(records)
    charts = [
        Lines(f"{metric} over time", "seconds since training began", metric, over_time),
        Lines(f"{metric} over bytes", "MB sent by all ranks", metric, over_bytes),
        Lines(f"{metric} by {unit}", unit, metric, over_rounds, counts=True),
    ]
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def unit_of(records: Mapping[str, RunRecord]) -> str:
    """What runs are counted in. One process alone has epochs, but beside ranks it is counted in what these have."""
    several = [record for record in records.values() if record.num_ranks > 1]
    units = {record.unit for record in several or records.values()}
    return " or ".join(sorted(units, reverse=True))


def of_run(record: RunRecord) -> list[Chart]:
    """The charts of one run: its time, its batches, and its parts."""
    charts: list[Chart] = [_time_of_ranks(record), _batches_of_ranks(record)]
    if record.parts is not None:
        charts += of_parts(record.parts)
    return charts


def of_parts(parts: PartsRecord, name: str = "") -> list[Chart]:
    """The charts of parts: the edges between them, and their labels if there are some. Titles begin with ``name``."""
    edges, labels = _edges_between(parts), _labels_of_parts(parts)
    charts: list[Chart] = [edges, labels] if parts.labels else [edges]
    return [replace(chart, title=f"{name}{chart.title}") for chart in charts]


def _megabytes_by_round(record: RunRecord) -> dict[int, float]:
    """What all ranks had sent by the end of each round; empty if that is not known."""
    sent = record.bytes_sent or []
    return {} if not sent else {row.round_idx: total / 1e6 for row, total in zip(record.ranks[0], sent, strict=True)}


def _time_of_ranks(record: RunRecord) -> Bars:
    pieces = ["training", "data", "meeting", "validation"]
    lengths = [
        [sum(getattr(row, f"{piece}_seconds") or 0.0 for row in rows) for piece in pieces] for rows in record.ranks
    ]
    return Bars("Where the time went", "seconds", pieces, _numbered("rank", lengths), lengths)


def _batches_of_ranks(record: RunRecord) -> HeatMap:
    """Batches of each rank in each round. A rank that came late, or left, has empty cells."""
    rounds = sorted({row.round_idx for rows in record.ranks for row in rows})
    per_column = max(1, ceil(len(rounds) / MAX_COLUMNS))
    groups = [rounds[at : at + per_column] for at in range(0, len(rounds), per_column)]
    cells = [_batches_in(rows, groups) for rows in record.ranks]
    columns = [str(group[0]) for group in groups]
    each = "" if per_column == 1 else f", {per_column} {record.unit}s to a column"
    title = f"Batches by rank and {record.unit}{each}"
    ranks = [str(rank) for rank in range(len(cells))]
    return HeatMap(title, record.unit, "rank", columns, ranks, cells, as_share=False)


def _batches_in(rows: Sequence[RankRound], groups: Sequence[Sequence[int]]) -> list[float | None]:
    batches = {row.round_idx: float(row.batches) for row in rows}
    found = [[batches[at] for at in group if at in batches] for group in groups]
    return [sum(counts) if counts else None for counts in found]


def _edges_between(parts: PartsRecord) -> HeatMap:
    """The share of the edges into each part (column) that comes from each part (row); a column adds up to 1."""
    totals = [max(1, sum(column)) for column in zip(*parts.edges, strict=True)]
    cells: list[list[float | None]] = [
        [count / total for count, total in zip(row, totals, strict=True)] for row in parts.edges
    ]
    title = f"Edges between parts: {parts.cut_ratio:.1%} are cut"
    names = [str(part) for part in range(len(cells))]
    return HeatMap(title, "into part", "from part", names, names, cells, as_share=True)


def _labels_of_parts(parts: PartsRecord) -> Bars:
    whole = [sum(column) for column in zip(*parts.labels, strict=True)]
    order = sorted(range(len(whole)), key=lambda index: -whole[index])
    named, rest = (order, []) if len(order) <= MAX_CLASSES else (order[: MAX_CLASSES - 1], order[MAX_CLASSES - 1 :])
    rows = [_shares(counts, named, rest) for counts in [*parts.labels, whole]]
    pieces = [f"class {parts.classes[index]}" for index in named] + ([f"{len(rest)} others"] if rest else [])
    names = [*_numbered("part", parts.labels), "graph"]
    return Bars("Labels of the training nodes", "share", pieces, names, rows)


def _shares(counts: Sequence[int], named: Sequence[int], rest: Sequence[int]) -> list[float]:
    total = max(1, sum(counts))
    shares = [counts[index] / total for index in named]
    return [*shares, sum(counts[index] for index in rest) / total] if rest else shares


def _numbered(what: str, rows: Sequence[object]) -> list[str]:
    return [f"{what} {number}" for number, _ in enumerate(rows)]


def metric_of(records: Mapping[str, RunRecord]) -> str:
    """The metric to compare runs by: the one that most of them monitor, the earliest if several tie."""
    names = [record.monitor for record in records.values() if record.monitor is not None]
    if not names:
        raise ValueError("No metric was logged in these runs: log one in validation_step, or name one by --metric.")
    return max(dict.fromkeys(names), key=names.count)
