"""What a graph is like, in numbers and words: sizes, degrees, labels, splits; of a typed graph for each type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.checks import aligned, holds_integers
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.rows import row_slices
from lightning_gnn_dist.graph.typed.types import GraphTypes


def report_of(graph: Graph) -> str:
    """Return what a graph is like, of a typed one two tables. Two passes over the edges; memory as for the nodes."""
    graph.check_edges()
    if graph.types.have_names:
        return report_of_types(graph.indptr, graph.indices, graph.types)
    arrays, y, degrees = graph.node_arrays | graph.edge_arrays, labels_of(graph), graph.degrees()
    sent, same_label = _tally(graph, y)
    ordered, last = degrees.sort().values, graph.num_nodes - 1
    median, most, largest = (int(ordered[round(share * last)]) if last >= 0 else 0 for share in (0.5, 0.9, 1.0))
    told = {name: f"{_kind(array)} {list(array.shape)}" for name, array in {"indices": graph.indices, **arrays}.items()}
    lines = [
        f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_bytes / 1e6:,.1f} MB",
        f"arrays: {', '.join(f'{name} ({what})' for name, what in told.items())}",
        f"neighbours: {median:,} in the median, at most {most:,} for nine in ten, {largest:,} at most; "
        f"{int((degrees == 0).sum()):,} nodes have none",
        "every node sends as many edges as it receives, as in an undirected graph"
        if sent.equal(degrees)
        else "directed: not every edge has its reverse",
    ]
    if y is not None:
        share = "" if same_label is None else f", {same_label:.0%} of the edges between nodes of one label"
        lines.append(f"labels: {_num_classes(y):,} classes{share}")
    splits = [f"{count:,} {name} ({count / graph.num_nodes:.1%})" for name, count in _splits(arrays).items()]
    return "\n".join([*lines, f"split: {', '.join(splits) or 'none'}"])


def report_of_types(indptr: Tensor, indices: Tensor, types: GraphTypes) -> str:
    """Return what a typed graph is like, whose edges were checked, after one pass over them."""
    receivers, most = _runs(indptr, types)
    per_edge = indices.element_size() + (types.edge_type.element_size() if "edge_type" in types.arrays else 0)
    num_bytes, of_edges, of_nodes = indptr.nbytes, [], []
    for number, (kind, count) in enumerate(zip(types.edge_types, types.num_edges, strict=True)):
        arrays, target = types.edge_arrays[kind], kind[2]
        size = count * per_edge + _bytes(arrays)
        share = f"{receivers[number] / types.num_nodes[target]:.0%} of {target}"
        of_edges.append((" ".join(kind), f"{count:,}", _mega(size), share, f"{most[number]:,}", _told(arrays)))
        num_bytes += size
    for name, count in types.num_nodes.items():
        arrays, y = types.node_arrays[name], as_labels(types.node_arrays[name].get("y"))
        split = ", ".join(f"{marked:,} {mask}" for mask, marked in _splits(arrays).items()) or "-"
        labels = "-" if y is None else f"{_num_classes(y):,} classes"
        of_nodes.append((name, f"{count:,}", _mega(_bytes(arrays)), split, labels, _told(arrays)))
        num_bytes += _bytes(arrays)
    sizes = f"{types.offsets[-1]:,} nodes of {len(of_nodes)} types, {indices.numel():,} edges of {len(of_edges)} types"
    order = "the sender" if types.time is None else f"{types.time}, then the sender"
    return "\n".join(
        [
            f"{sizes}, {_mega(num_bytes)} MB",
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


def _tally(graph: Graph, y: Tensor | None) -> tuple[Tensor, float | None]:
    """Out-degrees, shape (N,), and the share of equal labels among edges that have both."""
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


def _num_classes(y: Tensor) -> int:
    return int(y[y >= 0].unique().numel())


def _splits(arrays: Mapping[str, Tensor]) -> dict[str, int]:
    return {name.removesuffix("_mask"): int(a.sum()) for name, a in arrays.items() if name.endswith("_mask")}


def _bytes(arrays: Mapping[str, Tensor]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _mega(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _kind(array: Tensor) -> str:
    return str(array.dtype).removeprefix("torch.")


def _told(arrays: Mapping[str, Tensor]) -> str:
    rows = {name: "".join(f" x {length}" for length in array.shape[1:]) for name, array in arrays.items()}
    return ", ".join(f"{name} ({_kind(array)}{rows[name]})" for name, array in arrays.items()) or "-"


def as_labels(y: Tensor | None) -> Tensor | None:
    """``y``, if it is one integer per node."""
    return y if y is not None and y.dim() == 1 and holds_integers(y) else None


def labels_of(graph: Graph) -> Tensor | None:
    """``y``, if it is one integer per node, with -1 for a node without a label.

    Of a typed graph, one integer for each node of all types: classes of a type are numbered on from those of the type
    before. Where a type was chosen to learn from, others have none.
    """
    types = graph.types
    kinds = types.node_types if types.seeds is None else (types.seeds,)
    found = {kind: y for kind in kinds if (y := as_labels(types.node_arrays[kind].get("y"))) is not None and y.numel()}
    labels, num_classes = torch.full((graph.num_nodes,), -1), 0
    for kind, y in found.items():
        nodes = types.nodes_of(kind)
        labels[nodes.start : nodes.stop] = torch.where(y < 0, -1, y + num_classes)
        num_classes += int(y.max()) + 1
    return labels if found else None
