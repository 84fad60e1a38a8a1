"""NaN, infinity and labels that are none, found before training makes all weights of them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph

NODE_ARRAYS, EDGE_ARRAYS = ("x", "x_scale"), ("edge_weight", "edge_attr")  # what models read
IGNORED = -100  # which cross_entropy leaves out
_NUMBERS_AT_ONCE = 1 << 22  # bounds what is read of a memory map at a time
_WAY_OUT = "Repair it, or switch this check off by Loading(check_values=False)."


class ValueCheck:
    """Looks at each graph once, one pass over the arrays that models read, in pieces.

    Args:
        is_on: Whether it looks at all.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._seen: Graph | None = None

    def of_training(self, graph: Graph, seeds: Tensor) -> None:
        """What a rank trains on, and the labels of what it learns from."""
        if graph is not self._seen:
            self.of_arrays(graph)
            self.of_labels(graph, seeds, "train_mask")

    def of_arrays(self, graph: Graph) -> None:
        """The arrays that models read."""
        if not self.is_on or graph is self._seen:
            return
        for name in NODE_ARRAYS:
            if (row := _first_bad(graph.node_arrays.get(name))) is not None:
                raise ValueError(f"{name} of node {_name(graph, row)} is NaN or infinite. {_WAY_OUT}")
        for name in EDGE_ARRAYS:
            if (row := _first_bad(graph.edge_arrays.get(name))) is not None:
                receiver = int(torch.searchsorted(graph.indptr, torch.tensor(row), right=True)) - 1
                ends = f"{_name(graph, int(graph.indices[row]))} to {_name(graph, receiver)}"
                raise ValueError(f"{name} of the edge from {ends} is NaN or infinite. {_WAY_OUT}")
        self._seen = graph

    def of_labels(self, graph: Graph, nodes: Tensor, mask: str) -> None:
        """Labels that are used: whole numbers from 0 on, one a node; or finite numbers."""
        labels = graph.node_arrays.get("y")
        if not self.is_on or labels is None or not nodes.numel():
            return
        used = labels[nodes.to(labels.device)]
        if labels.is_floating_point():
            bad, what = ~used.isfinite().view(len(used), -1).all(1), "which is NaN or infinite"
        elif labels.dim() == 1 and labels.dtype != torch.bool:
            bad, what = (used < 0) & (used != IGNORED), f"and classes are counted from 0 ({IGNORED} counts for nothing)"
        else:
            return  # several labels a node may have a sign for those that are missing
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            node = _name(graph, int(nodes[first]))
            raise ValueError(
                f"y of node {node} is {used[first].tolist()}, {what}, but {mask} marks the node. Leave it out of the "
                "mask, or switch this check off by Loading(check_values=False)."
            )


def _first_bad(array: Tensor | None) -> int | None:
    """The first row with a number that is not finite."""
    if array is None or not (array.is_floating_point() or array.is_complex()) or not array.numel():
        return None
    rows = max(1, _NUMBERS_AT_ONCE * len(array) // array.numel())
    for start in range(0, len(array), rows):
        piece = array[start : start + rows]
        if not bool(piece.sum().isfinite()):  # no NaN gets lost in a sum, which is as fast as memory
            bad = ~piece.isfinite().view(len(piece), -1).all(1)  # or large numbers have overflowed it
            if bool(bad.any()):
                return start + int(bad.nonzero()[0])
    return None


def _name(graph: Graph, row: int) -> int:
    """The number that the user knows a node by: a part counts its nodes anew."""
    ids = graph.node_arrays.get("n_id")
    return row if ids is None else int(ids[row])
