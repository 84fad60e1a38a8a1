"""What a graph is like, in numbers: sizes, degrees, labels, splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.report import TypesReport, as_labels


@dataclass(frozen=True, eq=False)
class GraphReport:
    """The size, degrees, labels and splits of a graph; ``str(report)`` tells them in sentences.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of stored edges: an undirected one, stored in both directions, counts twice.
        num_bytes: Bytes of all arrays.
        arrays: Name, with type and shape, of ``indices`` and of every node and edge array.
        degrees: In-degrees: the median, the 90th percentile and the largest.
        without_neighbors: Number of nodes without an in-neighbour.
        is_balanced: Whether every node sends as many edges as it receives, as in an undirected graph.
        same_label: Share of the edges between labelled nodes that join equal labels; ``None`` when ``y`` is not one
            integer per node, or no edge has labels at both ends.
        num_classes: Number of distinct labels from 0 on; ``None`` when ``y`` is not one integer per node.
        splits: Number of nodes that each mask marks, by its name without ``_mask``.
    """

    num_nodes: int
    num_edges: int
    num_bytes: int
    arrays: dict[str, str]
    degrees: tuple[int, int, int]
    without_neighbors: int
    is_balanced: bool
    same_label: float | None
    num_classes: int | None
    splits: dict[str, int]

    @classmethod
    def of(cls, graph: Graph) -> GraphReport:
        """Measure a graph. Two passes over the edges; memory in proportion to the nodes."""
        graph.check_edges()
        degrees = graph.degrees()
        ordered = degrees.sort().values
        y = labels_of(graph)
        sent, same_label = _tally(graph, y)
        arrays = {"indices": graph.indices} | graph.node_arrays | graph.edge_arrays
        return cls(
            num_nodes=graph.num_nodes,
            num_edges=graph.num_edges,
            num_bytes=graph.num_bytes,
            arrays={name: f"{str(a.dtype).removeprefix('torch.')} {list(a.shape)}" for name, a in arrays.items()},
            degrees=(_quantile(ordered, 0.5), _quantile(ordered, 0.9), _quantile(ordered, 1.0)),
            without_neighbors=int((degrees == 0).sum()),
            is_balanced=torch.equal(sent, degrees),
            same_label=same_label,
            num_classes=None if y is None else int(y[y >= 0].unique().numel()),
            splits={n.removesuffix("_mask"): int(a.sum()) for n, a in graph.node_arrays.items() if n.endswith("_mask")},
        )

    def __str__(self) -> str:
        median, most, largest = self.degrees
        lines = [
            f"{self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.num_bytes / 1e6:,.1f} MB",
            f"arrays: {', '.join(f'{name} ({what})' for name, what in self.arrays.items())}",
            f"neighbours: {median:,} in the median, at most {most:,} for nine in ten, {largest:,} at most; "
            f"{self.without_neighbors:,} nodes have none",
            "every node sends as many edges as it receives, as in an undirected graph"
            if self.is_balanced
            else "directed: not every edge has its reverse",
        ]
        if self.num_classes is not None:
            share = (
                "" if self.same_label is None else f", {self.same_label:.0%} of the edges between nodes of one label"
            )
            lines.append(f"labels: {self.num_classes:,} classes{share}")
        splits = [f"{count:,} {name} ({count / self.num_nodes:.1%})" for name, count in self.splits.items()]
        return "\n".join([*lines, f"split: {', '.join(splits) or 'none'}"])


def report_of(graph: Graph) -> GraphReport | TypesReport:
    """Measure a graph, a typed one by type."""
    if not have_names(graph.types):
        return GraphReport.of(graph)
    graph.check_edges()
    return TypesReport.of(graph.indptr, graph.indices, graph.types)


def labels_of(graph: Graph) -> Tensor | None:
    """``y``, if it is one integer per node.

    Of a typed graph, one integer for each node of all types: classes of a type are numbered on from those of the type
    before, and a node without a label has -1. Where a type was chosen to learn from, others have none.
    """
    types = graph.types
    if not have_names(types):
        return as_labels(graph.node_arrays.get("y"))
    labels, num_classes = torch.full((graph.num_nodes,), -1), 0
    for kind in types.node_types if types.seeds is None else (types.seeds,):
        y, nodes = as_labels(types.node_arrays[kind].get("y")), types.nodes_of(kind)
        if y is not None and y.numel():
            labels[nodes.start : nodes.stop] = torch.where(y < 0, -1, y + num_classes)
            num_classes += int(y.max()) + 1
    return labels if num_classes else None


def _tally(graph: Graph, y: Tensor | None) -> tuple[Tensor, float | None]:
    """Out-degrees, shape (N,), and ``same_label`` of the report."""
    sent = torch.zeros(graph.num_nodes, dtype=torch.int64)
    same = known = 0
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        sender = graph.indices[start : start + EDGES_AT_ONCE].to(torch.int64)
        sent += torch.bincount(sender, minlength=graph.num_nodes)
        if y is not None:
            edge = torch.arange(start, start + sender.numel())
            of_sender, of_receiver = y[sender], y[torch.searchsorted(graph.indptr, edge, right=True) - 1]
            both = (of_sender >= 0) & (of_receiver >= 0)
            known += int(both.sum())
            same += int((both & (of_sender == of_receiver)).sum())
    return sent, same / known if known else None


def _quantile(ordered: Tensor, share: float) -> int:
    return int(ordered[round(share * (ordered.numel() - 1))]) if ordered.numel() else 0
