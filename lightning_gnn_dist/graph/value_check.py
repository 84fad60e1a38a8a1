"""Finds NaN, infinity and invalid labels before training spreads them to all weights."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.convert import first_bad
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered

EDGE_ARRAYS = ("edge_weight", "edge_attr")  # what models read beside x of nodes
IGNORED = -100  # the label that cross_entropy leaves out
_WAY_OUT = "Repair it, or switch this check off by Loading(check_values=False)."


def check_arrays(graph: Graph) -> None:
    """Refuse NaN and infinity in the arrays that models read: one pass over them, in pieces, and none over the same."""
    read = [arrays.get("x") for arrays in graph.types.node_arrays.values()]
    read += [arrays.get(name) for arrays in graph.types.edge_arrays.values() for name in EDGE_ARRAYS]
    remembered(graph, "checked values", lambda: _check_arrays(graph), read)


def _check_arrays(graph: Graph) -> None:
    for kind, arrays in graph.types.node_arrays.items():
        if (row := first_bad(arrays.get("x"))) is not None:
            node = row if "n_id" not in arrays else int(arrays["n_id"][row])
            of_type = f" of type {kind!r}" if kind else ""
            raise ValueError(f"x of node {node}{of_type} is NaN or infinite. {_WAY_OUT}")
    for edge_type, arrays in graph.types.edge_arrays.items():
        for name in EDGE_ARRAYS:
            if (row := first_bad(arrays.get(name))) is not None:
                which = f"an edge of type {edge_type}" if any(edge_type) else f"the edge {_ends(graph, row)}"
                raise ValueError(f"{name} of {which} is NaN or infinite. {_WAY_OUT}")


def check_labels(graph: Graph, nodes: Tensor, mask: str) -> None:
    """Refuse labels of ``nodes`` that are infinite, NaN in all columns, or negative but not -100.

    The error names ``mask``.
    """
    if not nodes.numel():
        return
    kind = graph.types.node_types[int(graph.types.type_of(nodes[:1]))]
    labels = graph.types.node_arrays[kind].get("y")
    if labels is None:
        return
    used = labels[(nodes - graph.types.nodes_of(kind).start).to(labels.device)]
    if labels.is_floating_point():
        # Of several labels some may be missing.
        rows = used.reshape(len(used), -1)
        bad, what = rows.isinf().any(1) | rows.isnan().all(1), "which is NaN or infinite"
    elif labels.dim() == 1 and labels.dtype != torch.bool:
        bad, what = (used < 0) & (used != IGNORED), f"and classes are counted from 0 ({IGNORED} counts for nothing)"
    else:
        return  # with several labels per node, a negative one may stand for a missing one
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"y of node {_name(graph, int(nodes[first]))} is {used[first].tolist()}, {what}, but {mask} marks the "
            "node. Leave it out of the mask, or switch this check off by Loading(check_values=False)."
        )


def _ends(graph: Graph, position: int) -> str:
    receiver = int(torch.searchsorted(graph.indptr, torch.tensor(position), right=True)) - 1
    return f"from {_name(graph, int(graph.indices[position]))} to {_name(graph, receiver)}"


def _name(graph: Graph, row: int) -> int:
    """The node's id in the whole graph, or in its type there: a part numbers its nodes from 0."""
    number = int(graph.types.type_of(torch.tensor(row)))
    local = row - graph.types.offsets[number]
    ids = graph.types.node_arrays[graph.types.node_types[number]].get("n_id")
    return local if ids is None else int(ids[local])
