"""What a partition does to a graph, in numbers: a table to read before training."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import labels_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.partition import kernels

MAX_ROWS = 64  # parts that str() lists; a partition into super-nodes can have thousands


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
                for kind, nodes in (graph.types.splits("train") if have_names(graph.types) else {}).items()
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
        columns = [
            ("part", [str(part) for part in range(self.nodes.numel())]),
            ("nodes", _counts(self.nodes)),
            ("training nodes", self._or_dashes(self.train_nodes)),
            *((f"of {kind}", _counts(column)) for kind, column in self.train_of_types.items()),
            ("edges inside", _counts(self.inside_edges)),
            ("halo nodes", _counts(self.halo_nodes)),
            ("isolated nodes", _counts(self.isolated_nodes)),
            ("label skew", self._skews()),
        ]
        return "\n".join([*_table(columns), self._summary()])

    def _summary(self) -> str:
        worst = self.worst_label_skew
        return (
            f"{self.nodes.numel():,} parts: {self.cut_edges:,} of {self.num_edges:,} edges cut "
            f"({self.cut_ratio:.1%}), {int(self.isolated_nodes.sum()):,} nodes left without neighbours, "
            f"worst label skew {'-' if worst is None else format(worst, '.3f')}"
        )

    def _or_dashes(self, column: Tensor | None) -> list[str]:
        return ["-"] * self.nodes.numel() if column is None else _counts(column)

    def _skews(self) -> list[str]:
        if self.label_skew is None:
            return self._or_dashes(None)
        return ["-" if skew != skew else f"{skew:.3f}" for skew in self.label_skew.tolist()]  # NaN != NaN


def _tally_edges(graph: Graph, assignment: Tensor, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    graph.check_edges()
    inside, halo, isolated = (np.zeros(num_parts, np.int64) for _ in range(3))
    seen = np.empty(graph.num_nodes, np.uint64)
    csr = graph.indptr.numpy(), graph.indices.numpy(), assignment.numpy()
    for first in range(0, num_parts, kernels.PARTS_AT_ONCE):
        kernels.tally(*csr, first, seen, inside, halo, isolated)
    return torch.from_numpy(inside), torch.from_numpy(halo), torch.from_numpy(isolated)


def _counts(column: Tensor) -> list[str]:
    return [f"{count:,}" for count in column.tolist()]


def _table(columns: list[tuple[str, list[str]]]) -> list[str]:
    """The lines of a right-aligned table, the heading first."""
    shown = [[title, *cells[:MAX_ROWS]] for title, cells in columns]
    widths = [max(map(len, column)) for column in shown]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*shown, strict=True)
    ]
    hidden = len(columns[0][1]) - MAX_ROWS
    return [*lines, f"... and {hidden:,} more parts"] if hidden > 0 else lines


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
