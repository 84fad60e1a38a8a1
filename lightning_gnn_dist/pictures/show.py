"""Charts that a notebook shows as a picture: what a partition does to a graph, and runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_gnn_dist.callbacks.record import PartsRecord, RunRecord
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.pictures.charts import Chart, of_all, of_parts
from lightning_gnn_dist.pictures.svg import together


@dataclass(frozen=True, repr=False)
class Pictures:
    """Charts in rows, which a notebook shows. ``_repr_svg_()`` is a whole file of SVG."""

    rows: Sequence[Sequence[Chart]]

    def __repr__(self) -> str:
        return f"Pictures({sum(map(len, self.rows))} charts)"

    def _repr_svg_(self) -> str:
        return together(self.rows)


def parts(graph: Graph, partitions: Mapping[str, Partition]) -> Pictures:
    """A column for each partition: the edges between its parts, then the labels of its training nodes."""
    columns = [of_parts(PartsRecord.of(graph, each), f"{name}: ") for name, each in partitions.items()]
    return Pictures(list(zip(*columns, strict=True)))


def runs(records: Mapping[str, RunRecord], metric: str) -> Pictures:
    """A metric of several runs, by round and over the bytes that were sent.

    Args:
        records: For each run its name and ``RunReport.record``, or ``RunRecord.load(folder)``.
        metric: The name under which the module has logged it.
    """
    charts = of_all(records, metric)
    if not charts:
        known = chain.from_iterable(measured.metrics for record in records.values() for measured in record.rounds)
        raise ValueError(f"metric names {metric!r}, which no run has measured: they have {sorted(set(known))}.")
    return Pictures([charts[:0:-1]])  # without the first, over time: seconds are those of this machine
