"""What the report of a partition shows, in sentences: how parts differ, which strategy and fan-out to use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.with_arrays import bytes_of_part
from lightning_gnn_dist.partition.advice import DIFFERENT, LOST, about_labels, beyond_chance, strategy
from lightning_gnn_dist.partition.partition_report import PartitionReport

UNEVEN = 1.25  # training nodes of the largest part against the mean
MOST = 0.75  # share of a part that one batch may reach before another sampler is advised
FANOUT = (15, 10)
BATCH_SIZE = 1024


@dataclass(frozen=True)
class Finding:
    """What the figures of a partition show, and the advice.

    Args:
        parts_differ: Whether labels differ between the parts by more than chance.
        edges_lost: Whether many nodes lost all their neighbours.
        sentences: Both in words, then the advice.
    """

    parts_differ: bool
    edges_lost: bool
    sentences: list[str]


def advise(graph: Graph, report: PartitionReport) -> Finding:
    """Advise on the strategy, the fan-out and the training nodes. Of a typed graph no fan-out is judged."""
    excess = skew_beyond_chance(graph, report)
    isolated = int(report.isolated_nodes.sum()) / max(graph.num_nodes, 1)
    parts_differ = excess is not None and excess >= DIFFERENT
    edges_lost = isolated >= LOST
    sentences = [
        about_labels(excess),
        f"{report.cut_ratio:.0%} of the edges are cut. {isolated:.1%} of the nodes lost all their neighbours, "
        + ("too many to ignore." if edges_lost else "which are few."),
        strategy(graph, parts_differ, edges_lost, report.cut_ratio, are_known=excess is not None),
        *([] if have_names(graph.types) else [_fanout(graph, report)]),  # it has one for each edge type
    ]
    return Finding(parts_differ, edges_lost, [*sentences, *_about_training_nodes(report)])


def bytes_per_part(graph: Graph, report: PartitionReport) -> Tensor:
    """Bytes that every part takes in RAM: its nodes, the edges among them and their arrays, shape ``(P,)``."""
    return bytes_of_part(graph, report.nodes, report.inside_edges)


def skew_beyond_chance(graph: Graph, report: PartitionReport) -> float | None:
    """The mean label skew of the parts, less what parts drawn at random would have; ``None`` without labels.

    A part with ``n`` labelled nodes drawn at random has a skew of about ``sum_c sqrt(q_c (1 - q_c) / (2 pi n))``,
    where ``q_c`` is the share of class ``c``. That is much if training nodes are few.
    """
    return beyond_chance(graph, report.label_skew, report.train_nodes, report.nodes)


def _fanout(graph: Graph, report: PartitionReport) -> str:
    degrees = graph.degrees() * (1 - report.cut_ratio)
    first = float(degrees.clamp(max=FANOUT[0]).mean())
    reached = degrees.clamp(max=FANOUT[1])
    second = float((degrees * reached).sum() / degrees.sum().clamp(min=1e-9))  # nodes with many edges are reached more
    part = int(report.nodes.max())
    seeds = min(BATCH_SIZE, part if report.train_nodes is None else int(report.train_nodes.max()))
    share = 1 - math.exp(-seeds * (1 + first + first * second) / part)  # as if nodes were reached at random
    drawn = (
        f"A node keeps {float(degrees.mean()):.1f} neighbours in the mean, of which NeighborSampler({list(FANOUT)}) "
        f"draws {first:.1f}; a batch of {seeds:,} seeds reaches about {share:.0%} of a part"
    )
    if share < MOST:
        return f"{drawn}."
    return f"{drawn}: smaller batches or fan-outs cost less, and WholePartSampler({len(FANOUT)}) spares the sampling."


def _about_training_nodes(report: PartitionReport) -> list[str]:
    if report.train_nodes is None:
        return ["There is no train_mask, so how training nodes are shared is not known."]
    most, mean = int(report.train_nodes.max()), float(report.train_nodes.double().mean())
    if not bool(report.train_nodes.all()):
        part = int((report.train_nodes == 0).nonzero()[0])
        return [f'Part {part} has no training node, so training would stop: MetisPartitioner(balance="train").']
    if most > UNEVEN * mean:
        return [
            f"The largest part has {most:,} training nodes, {most / mean:.1f} times the mean, and sets the number of "
            'steps. With METIS, balance="train" evens them out.'
        ]
    return []
