"""What a graph is like, in numbers: sizes, degrees, labels, splits; of a typed graph for each type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.checks import aligned
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.rows import row_slices
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.graph.value_check import as_labels, labels_of


@dataclass(frozen=True)
class NodesOfType:
    """The nodes of one type.

    Args:
        name: The type.
        count: How many there are.
        num_bytes: Bytes of their arrays.
        arrays: Type of each array, and the length of a row, by its name.
        num_classes: Number of distinct labels from 0 on; None where ``y`` is not one integer per node.
        splits: How many nodes each mask marks, by its name without ``_mask``.
    """

    name: str
    count: int
    num_bytes: int
    arrays: dict[str, str]
    num_classes: int | None
    splits: dict[str, int]


@dataclass(frozen=True)
class EdgesOfType:
    """The edges of one type.

    Args:
        edge_type: Source type, name and destination type.
        count: How many there are.
        num_bytes: Bytes of their ends, types and arrays.
        arrays: Type of each array, and the length of a row, by its name.
        receivers: How many nodes of the destination type receive one, at least.
        most: How many the node with most of them receives.
    """

    edge_type: EdgeType
    count: int
    num_bytes: int
    arrays: dict[str, str]
    receivers: int
    most: int


@dataclass(frozen=True, eq=False)
class TypesReport:
    """The sizes, labels and splits of a typed graph; ``str(report)`` tells them in two tables.

    Args:
        nodes: The nodes of each type.
        edges: The edges of each type.
        num_bytes: Bytes of all arrays.
        time: The array in whose order edges are, see :class:`GraphTypes`.
    """

    nodes: list[NodesOfType]
    edges: list[EdgesOfType]
    num_bytes: int
    time: str | None

    @classmethod
    def of(cls, indptr: Tensor, indices: Tensor, types: GraphTypes) -> TypesReport:
        """Measure a graph, whose edges were checked, in one pass over them."""
        receivers, most = _runs(indptr, types)
        per_edge = indices.element_size() + (types.edge_type.element_size() if "edge_type" in types.arrays else 0)
        edges = [
            EdgesOfType(kind, count, count * per_edge + _bytes(arrays), _shapes(arrays), receivers[i], most[i])
            for i, (kind, count) in enumerate(zip(types.edge_types, types.num_edges, strict=True))
            for arrays in [types.edge_arrays[kind]]
        ]
        nodes = [
            NodesOfType(kind, count, _bytes(arrays), _shapes(arrays), _classes(arrays.get("y")), _splits(arrays))
            for kind, count in types.num_nodes.items()
            for arrays in [types.node_arrays[kind]]
        ]
        num_bytes = indptr.nbytes + sum(row.num_bytes for row in nodes) + sum(row.num_bytes for row in edges)
        return cls(nodes, edges, num_bytes, types.time)

    def __str__(self) -> str:
        totals = {row.name: row.count for row in self.nodes}
        num_edges = sum(row.count for row in self.edges)
        sizes = (
            f"{sum(totals.values()):,} nodes of {len(self.nodes)} types, {num_edges:,} edges of {len(self.edges)} types"
        )
        order = "the sender" if self.time is None else f"{self.time}, then the sender"
        of_edges = [
            (
                " ".join(row.edge_type),
                *_sizes(row),
                f"{row.receivers / totals[row.edge_type[2]]:.0%} of {row.edge_type[2]}",
                f"{row.most:,}",
                _told(row.arrays),
            )
            for row in self.edges
        ]
        of_nodes = [(row.name, *_sizes(row), _split(row), _labels(row), _told(row.arrays)) for row in self.nodes]
        return "\n".join(
            [
                f"{sizes}, {self.num_bytes / 1e6:,.1f} MB",
                *aligned([("nodes", "number", "MB", "split", "labels", "arrays"), *of_nodes]),
                *aligned([("edges", "number", "MB", "received by", "at most", "arrays"), *of_edges]),
                f"edges of one type into a node are in order of {order}",
            ]
        )


def _runs(indptr: Tensor, types: GraphTypes) -> tuple[list[int], list[int]]:
    """For each edge type, how many nodes receive an edge of it, and how many the node with most of them does."""
    receivers, most = (torch.zeros(len(types.edge_types), dtype=torch.int64) for _ in range(2))
    for rows in row_slices(indptr):
        kinds = types.edge_type[int(indptr[rows.start]) : int(indptr[rows.stop])].to(torch.int64)
        if not kinds.numel():
            continue
        row = torch.arange(len(indptr[rows])).repeat_interleave(indptr[rows.start : rows.stop + 1].diff())
        _, lengths = (row * len(types.edge_types) + kinds).unique_consecutive(return_counts=True)
        of_run = kinds[lengths.cumsum(0) - 1]
        receivers += torch.bincount(of_run, minlength=receivers.numel())
        most.scatter_reduce_(0, of_run, lengths, "amax")
    return receivers.tolist(), most.tolist()


def _classes(y: Tensor | None) -> int | None:
    labels = as_labels(y)
    return None if labels is None else int(labels[labels >= 0].unique().numel())


def _splits(arrays: Mapping[str, Tensor]) -> dict[str, int]:
    return {name.removesuffix("_mask"): int(a.sum()) for name, a in arrays.items() if name.endswith("_mask")}


def _bytes(arrays: Mapping[str, Tensor]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _shapes(arrays: Mapping[str, Tensor]) -> dict[str, str]:
    rows = {name: "".join(f" x {length}" for length in array.shape[1:]) for name, array in arrays.items()}
    return {name: f"{str(array.dtype).removeprefix('torch.')}{rows[name]}" for name, array in arrays.items()}


def _told(arrays: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({what})" for name, what in arrays.items()) or "-"


def _sizes(row: NodesOfType | EdgesOfType) -> tuple[str, str]:
    return f"{row.count:,}", f"{row.num_bytes / 1e6:,.1f}"


def _split(row: NodesOfType) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in row.splits.items()) or "-"


def _labels(row: NodesOfType) -> str:
    return "-" if row.num_classes is None else f"{row.num_classes:,} classes"


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
