"""Draws negatives: pairs of nodes without an edge, which a link predictor learns to distinguish from edges."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.graph.graph import Graph

_TRIES = 16  # random draws; after these, nodes are tried one after the other


def draw_receivers(
    graph: Graph, senders: Tensor, ids: Tensor, count: int, key: np.uint64, num_candidates: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` nodes for each sender, none of them the sender or a node that it has an edge to, shape (n, count).

    A draw is uniform over the nodes, and depends on the key and the id alone, not on other draws. A sender with an edge
    to every candidate gets any node; the second result holds the positions of such senders.

    Args:
        graph: The graph whose edges to avoid.
        senders: Nodes, int64, shape (n,).
        ids: A number for each sender, so that their draws differ.
        count: Draws for each sender.
        key: The key of all these draws.
        num_candidates: Draw from the first ``num_candidates`` nodes. Default: from all.
    """
    out = np.empty((senders.numel(), count), np.int64)
    linked_with_all = np.zeros(senders.numel(), np.bool_)
    bound = graph.num_nodes if num_candidates is None else num_candidates
    csr = graph.indptr.numpy(), graph.indices.numpy()
    _draw_receivers(*csr, senders.numpy(), ids.numpy(), bound, key, out, linked_with_all)
    return torch.from_numpy(out), torch.from_numpy(linked_with_all).nonzero().view(-1)


def has_edges(graph: Graph, edges: Tensor) -> Tensor:
    """Whether the graph has each of ``edges``, shape ``(2, n)``: a bool for each, shape ``(n,)``."""
    out = np.empty(edges.shape[1], np.bool_)
    senders, receivers = edges.to(torch.int64).contiguous().numpy()
    _has_edges(graph.indptr.numpy(), graph.indices.numpy(), senders, receivers, out)
    return torch.from_numpy(out)


@inlined
def _is_edge(indptr: Array, indices: Array, sender: int, receiver: int) -> bool:
    found = False
    for at in range(max(indptr[receiver], 0), min(indptr[receiver + 1], len(indices))):
        found |= indices[at] == sender
    return found


@compiled
def _has_edges(indptr: Array, indices: Array, senders: Array, receivers: Array, out: Array) -> None:
    for i in range(len(senders)):
        out[i] = _is_edge(indptr, indices, senders[i], receivers[i])


@compiled
def _draw_receivers(
    indptr: Array,
    indices: Array,
    senders: Array,
    ids: Array,
    bound: int,
    key: np.uint64,
    out: Array,
    linked_with_all: Array,
) -> None:
    for i in range(len(senders)):
        for j in range(out.shape[1]):
            node, tried = -1, 0
            while node < 0 and tried < _TRIES + bound:
                if tried < _TRIES:
                    candidate = below(draw(key, ids[i], j * _TRIES + tried), bound)
                else:
                    candidate = (candidate + 1) % bound
                if candidate != senders[i] and not _is_edge(indptr, indices, senders[i], candidate):
                    node = candidate
                tried += 1
            linked_with_all[i] |= node < 0
            out[i, j] = node if node >= 0 else candidate
