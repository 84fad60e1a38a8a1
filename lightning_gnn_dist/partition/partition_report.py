"""What a partition does to a graph, in numbers, and advice from these: how parts differ, and which strategy to use.

The bounds come from measurements on eight graphs cut into eight parts (benchmarks/accuracy.md and the table of
partitions in docs/data.md). Where labels differ between parts by more than chance, averaging alone lost between one
and forty-nine points of accuracy, and gradients at every step none. Where parts are alike but a tenth of the nodes
lost all neighbours, averaging lost up to nineteen points, and a correction on the whole graph won most of them back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import labels_of
from lightning_gnn_dist.partition import kernels

MAX_ROWS = 64  # parts that str() lists; a partition into super-nodes can have thousands
DIFFERENT = 0.15  # label skew beyond chance, in the mean over training nodes
LOST = 0.1  # share of nodes without any neighbour
_HALF = 'LLCGStrategy(clock, correction=Correction(0.5, lr="local"))'


@dataclass(frozen=True, eq=False)
class PartitionReport:
    """Numbers of a partition: one entry per part in each tensor, shape ``(P,)``.

    Edges are counted as the graph stores them: an undirected edge, stored in both directions, is two.

    Args:
        nodes: Nodes in the part.
        train_nodes: Training nodes in the part; ``None`` without a ``train_mask``.
        inside_edges: Edges with both ends in the part. All others are cut.
        halo_nodes: Distinct nodes outside the part with an edge into it.
        isolated_nodes: Nodes that have in-neighbours in other parts and none in their own, not counting themselves.
        label_skew: Total variation distance between the labels of the part and those of the whole graph:
            0 when they are distributed alike, towards 1 when the part holds classes of its own. Only training
            nodes count if there is a ``train_mask``, and no negative labels. NaN for a part without labels;
            ``None`` when ``y`` is not one integer per node, or no node is labelled. Of a typed graph the classes of all
            types count, or those of the type that was chosen to learn from.
        num_edges: Edges of the graph.
        train_of_types: For each node type with a ``train_mask``, its training nodes in the part; empty without types.
    """

    nodes: Tensor
    train_nodes: Tensor | None
    inside_edges: Tensor
    halo_nodes: Tensor
    isolated_nodes: Tensor
    label_skew: Tensor | None
    num_edges: int
    train_of_types: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, assignment: Tensor, num_parts: int) -> PartitionReport:
        """Measure a partition. Needs memory in proportion to the nodes, beside the graph."""
        inside, halo, isolated = _tally_edges(graph, assignment, num_parts)
        return cls(
            nodes=torch.bincount(assignment, minlength=num_parts),
            train_nodes=train_nodes_of(graph, assignment, num_parts),
            inside_edges=inside,
            halo_nodes=halo,
            isolated_nodes=isolated,
            label_skew=label_skew(graph, assignment, num_parts),
            num_edges=graph.num_edges,
            train_of_types={
                kind: torch.bincount(assignment[nodes], minlength=num_parts)
                for kind, nodes in graph.types.splits("train").items()
                if kind
            },
        )

    @property
    def cut_edges(self) -> int:
        """Edges whose ends lie in different parts."""
        return self.num_edges - int(self.inside_edges.sum())

    @property
    def cut_ratio(self) -> float:
        """Cut edges as a share of all edges, in [0, 1]."""
        return self.cut_edges / max(self.num_edges, 1)

    @property
    def worst_label_skew(self) -> float | None:
        """The largest label skew of a part; ``None`` when no part has labels."""
        if self.label_skew is None:
            return None
        known = self.label_skew[~self.label_skew.isnan()]
        return float(known.max()) if known.numel() else None

    def __str__(self) -> str:
        columns: dict[str, Tensor | None] = {"part": torch.arange(self.nodes.numel()), "nodes": self.nodes}
        columns |= {"training nodes": self.train_nodes}
        columns |= {f"of {kind}": column for kind, column in self.train_of_types.items()}
        columns |= {"edges inside": self.inside_edges, "halo nodes": self.halo_nodes}
        columns |= {"isolated nodes": self.isolated_nodes, "label skew": self.label_skew}
        count, worst = self.nodes.numel(), self.worst_label_skew
        shown = min(count, MAX_ROWS)
        cells = [
            [name, *(["-"] * shown if c is None else map(_told, c[:shown].tolist()))] for name, c in columns.items()
        ]
        widths = [max(map(len, column)) for column in cells]
        return "\n".join(
            [
                *("  ".join(map(str.rjust, row, widths)) for row in zip(*cells, strict=True)),
                *([f"... and {count - shown:,} more parts"] if count > shown else []),
                f"{count:,} parts: {self.cut_edges:,} of {self.num_edges:,} edges cut ({self.cut_ratio:.1%}), "
                f"{int(self.isolated_nodes.sum()):,} nodes left without neighbours, "
                f"worst label skew {'-' if worst is None else format(worst, '.3f')}",
            ]
        )


def _told(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else "-" if math.isnan(number) else f"{number:.3f}"


def _tally_edges(graph: Graph, assignment: Tensor, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    graph.check_edges()
    inside, halo, isolated = (np.zeros(num_parts, np.int64) for _ in range(3))
    seen = np.empty(graph.num_nodes, np.uint64)
    csr = graph.indptr.numpy(), graph.indices.numpy(), assignment.numpy()
    for first in range(0, num_parts, kernels.PARTS_AT_ONCE):
        kernels.tally(*csr, first, seen, inside, halo, isolated)
    return torch.from_numpy(inside), torch.from_numpy(halo), torch.from_numpy(isolated)


def train_mask_of(graph: Graph) -> Tensor | None:
    """Which nodes are training nodes, of any type: one bool for each. ``None`` where no type has a ``train_mask``."""
    found = list(graph.types.splits("train").values())
    return torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill_(0, torch.cat(found), True) if found else None


def train_nodes_of(graph: Graph, assignment: Tensor, num_parts: int) -> Tensor | None:
    """The training nodes of every part, shape ``(P,)``; ``None`` without a ``train_mask``."""
    train_mask = train_mask_of(graph)
    return None if train_mask is None else torch.bincount(assignment[train_mask], minlength=num_parts)


def label_skew(graph: Graph, assignment: Tensor, num_parts: int) -> Tensor | None:
    """The distance between the labels of every part and those of the graph; see :class:`PartitionReport`."""
    y, train_mask = labels_of(graph), train_mask_of(graph)
    if y is None:
        return None
    labelled = y >= 0 if train_mask is None else (y >= 0) & train_mask
    if not bool(labelled.any()):
        return None
    classes, label = y[labelled].unique(return_inverse=True)
    cell = assignment[labelled].to(torch.int64) * classes.numel() + label
    counts = torch.bincount(cell, minlength=num_parts * classes.numel()).view(num_parts, -1).double()
    whole = counts.sum(0) / counts.sum()
    return (counts / counts.sum(1, keepdim=True) - whole).abs().sum(1) / 2


def against_averaging(graph: Graph, assignment: Tensor, num_parts: int, lost: float) -> str | None:
    """Return why models should not be averaged alone on these parts, and what to do; None where that loses little.

    It reads no edge, so that a fit can ask for it.

    Args:
        graph: The whole graph.
        assignment: The rank of every node.
        num_parts: How many ranks.
        lost: The share of training nodes without any neighbour in what their rank holds.
    """
    skew, nodes = label_skew(graph, assignment, num_parts), torch.bincount(assignment, minlength=num_parts)
    return _against(beyond_chance(graph, skew, train_nodes_of(graph, assignment, num_parts), nodes), lost)


def advice(graph: Graph, report: PartitionReport) -> str:
    """Say which strategy to use on a partition, and why."""
    excess = beyond_chance(graph, report.label_skew, report.train_nodes, report.nodes)
    if (reason := _against(excess, int(report.isolated_nodes.sum()) / max(graph.num_nodes, 1))) is not None:
        return reason
    if excess is None:
        return (
            "Without labels (one integer per node) it cannot be told whether the parts are alike. GrappaStrategy() "
            "loses nothing where they differ, and LocalSGDStrategy(EverySteps(16)) sends least."
        )
    return (
        f"The parts look alike: {max(excess, 0.0):.2f} of label skew beyond chance, in the mean. "
        "LocalSGDStrategy(EverySteps(16)) is enough: averaging loses little on such parts, and sends least."
    )


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


def _against(excess: float | None, lost: float) -> str | None:
    """Return why models should not be averaged alone, given label skew beyond chance and the share of lost nodes."""
    if excess is not None and excess >= DIFFERENT:
        correction = _HALF if lost >= LOST else "LLCGStrategy(clock)"
        return (
            f"The parts hold different labels: {excess:.2f} of label skew beyond chance, in the mean. Exchange "
            f"gradients every step (GrappaStrategy()), or meet rarely with {correction}, which corrects the drift. Do "
            "not average alone here; SuperNodePartitioner() makes parts that one can average."
        )
    if lost >= LOST:
        return (
            f"{lost:.0%} of the nodes lost all their neighbours. {_HALF}: its correction sees the edges that "
            "are cut. To average alone, keep more of them: SuperNodePartitioner(). With gradients every step "
            "(GrappaStrategy()), use MetisPartitioner(), or holding=Holding(Rotate())."
        )
    return None
