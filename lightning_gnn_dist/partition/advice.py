"""Advice from the figures of a partition: how parts differ, and which strategy to use.

The bounds come from measurements on eight graphs cut into eight parts (benchmarks/accuracy.md and the table of
partitions in docs/data.md). Where labels differ between parts by more than chance, averaging alone lost between one
and forty-nine points of accuracy, and gradients at every step none. Where parts are alike but a tenth of the nodes
lost all neighbours, averaging lost up to nineteen points, and a correction on the whole graph won most of them back.
Where nodes kept some neighbours, cut edges cost nothing up to 43 % of them, 2 points at 67 %, and 1 to 8 at 87 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import labels_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.partition_report import label_skew, train_mask_of, train_nodes_of

if TYPE_CHECKING:
    from lightning_gnn_dist.partition.partition_report import PartitionReport

DIFFERENT = 0.15  # label skew beyond chance, in the mean over training nodes
MANY = 0.55  # share of cut edges above which averaging lost accuracy on parts that look alike
LOST = 0.1  # share of nodes without any neighbour
UNEVEN = 1.25  # training nodes of the largest part against the mean
_HALF = 'LLCGStrategy(clock, correction=Correction(0.5, lr="local"))'


def against_averaging(graph: Graph, partition: Partition, lost: float) -> str | None:
    """Return why models should not be averaged alone on these parts, and what to do; None where that loses little.

    It reads no edge, so that a fit can ask for it.

    Args:
        graph: The whole graph.
        partition: The rank of every node.
        lost: The share of training nodes without any neighbour in what their rank holds.
    """
    num_parts = partition.num_parts
    skew = label_skew(graph, partition.assignment, num_parts)
    excess = beyond_chance(graph, skew, train_nodes_of(graph, partition.assignment, num_parts), partition.counts())
    parts_differ, edges_lost = excess is not None and excess >= DIFFERENT, lost >= LOST
    if not (parts_differ or edges_lost):
        return None
    reason = about_labels(excess) if parts_differ else f"{lost:.0%} of the training nodes lost all their neighbours."
    return f"{reason} {strategy(graph, parts_differ, edges_lost)}"


def advise(graph: Graph, report: PartitionReport) -> list[str]:
    """Say what the figures of a partition show, and which strategy to use."""
    excess = beyond_chance(graph, report.label_skew, report.train_nodes, report.nodes)
    isolated = int(report.isolated_nodes.sum()) / max(graph.num_nodes, 1)
    parts_differ, edges_lost = excess is not None and excess >= DIFFERENT, isolated >= LOST
    return [
        about_labels(excess),
        f"{report.cut_ratio:.0%} of the edges are cut. {isolated:.1%} of the nodes lost all their neighbours, "
        + ("too many to ignore." if edges_lost else "which are few."),
        strategy(graph, parts_differ, edges_lost, report.cut_ratio, are_known=excess is not None),
        *_about_training_nodes(report),
    ]


def beyond_chance(graph: Graph, skew: Tensor | None, train_nodes: Tensor | None, nodes: Tensor) -> float | None:
    """Return the mean label skew of parts, less what parts drawn at random would have; None without labels.

    A part with ``n`` labelled nodes drawn at random has a skew of about ``sum_c sqrt(q_c (1 - q_c) / (2 pi n))``,
    where ``q_c`` is the share of class ``c``. That is much if training nodes are few.
    """
    y, mask = labels_of(graph), train_mask_of(graph)
    if skew is None or y is None:
        return None
    labelled = y >= 0 if train_nodes is None or mask is None else (y >= 0) & mask
    shares = y[labelled].unique(return_counts=True)[1].double() / labelled.sum()
    counts = (nodes if train_nodes is None else train_nodes).double()
    chance = (shares * (1 - shares)).sqrt().sum() / (2 * math.pi * counts.clamp(min=1)).sqrt()
    weight = counts / counts.sum()
    return float(((skew.nan_to_num() - chance) * weight).sum())


def about_labels(excess: float | None) -> str:
    """Say how much the labels of parts differ."""
    if excess is None:
        return "Without labels (one integer per node) it cannot be told whether the parts are alike."
    if excess >= DIFFERENT:
        return f"The parts hold different labels: {excess:.2f} of label skew beyond chance, in the mean."
    return f"The parts look alike: {max(excess, 0.0):.2f} of label skew beyond chance, in the mean."


def strategy(
    graph: Graph, parts_differ: bool, edges_lost: bool, cut_ratio: float = 0.0, *, are_known: bool = True
) -> str:
    """Advise on the strategy."""
    if parts_differ:
        for_good = ", and with boundary=Halo(2, seed_hops=1) parts that have to stay lose less"
        correction = _HALF if edges_lost else "LLCGStrategy(clock)"
        return (
            f"Exchange gradients every step (GrappaStrategy()), or meet rarely with {correction}, which corrects the "
            "drift. Do not average alone here; SuperNodePartitioner() makes parts that one can average"
            f"{'' if have_names(graph.types) else for_good}."
        )
    if edges_lost:
        return (
            f"{_HALF}: its correction sees the edges that are cut. To average alone, "
            "keep more of them: SuperNodePartitioner(). With gradients every step (GrappaStrategy()), use "
            "MetisPartitioner(), or holding=Holding(Rotate())."
        )
    if not are_known:
        return (
            "GrappaStrategy() loses nothing where parts differ. LocalSGDStrategy(EverySteps(16)) sends least, and is "
            "enough if they are alike, as those of SuperNodePartitioner() mostly are."
        )
    if cut_ratio >= MANY:
        return (
            "LocalSGDStrategy(EverySteps(16)) sends least, and such parts can be averaged, but training on them alone "
            f"misses {cut_ratio:.0%} of the edges, and parts that missed 67 to 87 % lost 1 to 8 points. Keep the edges "
            'by boundary="auto", the default, or cut fewer, and compare with one process.'
        )
    return "LocalSGDStrategy(EverySteps(16)) is enough: averaging loses little on such parts, and sends least."


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
