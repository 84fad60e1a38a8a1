"""Draws negatives: pairs of nodes without an edge, which a link predictor learns to distinguish from edges."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.engine.typed.hops import edge_types_of
from lightning_gnn_dist.graph.graph import Graph

RANDOM_TRIES = 16  # after these, nodes are tried one after the other


class _Rows(NamedTuple):
    """Edges to look at.

    Attributes:
        indptr: Where each row starts.
        indices: The in-neighbours, row after row.
        kinds: The type of each edge; empty where all are looked at.
        kind: The type to look at.
    """

    indptr: Array
    indices: Array
    kinds: Array
    kind: int


def draw_receivers(
    graph: Graph,
    senders: Tensor,
    ids: Tensor,
    count: int,
    key: np.uint64,
    candidates: range | Tensor | None = None,
    edge_type: int | None = None,
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
        candidates: The nodes to draw from. Default: all.
        edge_type: Of a typed graph, the number of the edge type whose edges to avoid. Default: those of all types.
    """
    out = np.empty((senders.numel(), count), np.int64)
    linked_with_all = np.zeros(senders.numel(), np.bool_)
    candidates = range(graph.num_nodes) if candidates is None else candidates
    (first, some), bound = as_kernels_take(candidates), len(candidates)
    ends = senders.numpy(), ids.numpy()
    _draw_receivers(_rows(graph, edge_type), *ends, first, bound, some, key, out, linked_with_all)
    return torch.from_numpy(out), torch.from_numpy(linked_with_all).nonzero().view(-1)


def tried_places(keys: Tensor, ids: Tensor, draws: Tensor, tries: range, bounds: Tensor) -> Tensor:
    """Where among the candidates the nodes are that are tried in turn, shape ``(n, len(tries))``, for who has few rows.

    These are the tries of :func:`draw_receivers`. A draw has ``RANDOM_TRIES`` and as many as it has candidates.

    Args:
        keys: The key of each draw, as int64.
        ids: The number of its sender or event.
        draws: Which of the draws for that it is.
        tries: Which tries of each.
        bounds: From how many candidates each draws.
    """
    out = np.empty((ids.numel(), len(tries)), np.int64)
    named = keys.numpy().view(np.uint64), ids.numpy(), draws.numpy(), bounds.numpy()
    _tried_places(*named, tries.start, out)
    return torch.from_numpy(out)


def as_kernels_take(candidates: range | Tensor) -> tuple[int, Array]:
    """The first of the candidates if they follow each other, and otherwise all of them."""
    if isinstance(candidates, range):
        return candidates.start, np.empty(0, np.int64)
    return 0, candidates.numpy()


def has_edges(graph: Graph, edges: Tensor, edge_type: int | None = None) -> Tensor:
    """Whether the graph has each of ``edges``, shape ``(2, n)``: a bool for each, shape ``(n,)``.

    Of a typed graph ``edge_type`` is the number of the one type to look at. Default: all.
    """
    out = np.empty(edges.shape[1], np.bool_)
    senders, receivers = edges.to(torch.int64).contiguous().numpy()
    _has_edges(_rows(graph, edge_type), senders, receivers, out)
    return torch.from_numpy(out)


def _rows(graph: Graph, edge_type: int | None) -> _Rows:
    """The graph as kernels take it."""
    types = graph.types
    kinds = edge_types_of(None if edge_type is None else types)
    return _Rows(graph.indptr.numpy(), graph.indices.numpy(), kinds, edge_type or 0)


@inlined
def place_of_try(key: np.uint64, number: int, draw_of_sender: int, tried: int, bound: int) -> int:
    """Which of the candidates a try is."""
    last = min(tried, RANDOM_TRIES - 1)
    return (below(draw(key, number, draw_of_sender * RANDOM_TRIES + last), bound) + tried - last) % bound


@compiled
def _tried_places(keys: Array, ids: Array, draws: Array, bounds: Array, begin: int, out: Array) -> None:
    for i in range(len(ids)):
        for tried in range(out.shape[1]):
            out[i, tried] = place_of_try(keys[i], ids[i], draws[i], begin + tried, bounds[i])


@inlined
def _is_edge(rows: _Rows, sender: int, receiver: int) -> bool:
    found = False
    start, stop = max(rows.indptr[receiver], 0), min(rows.indptr[receiver + 1], len(rows.indices))
    if len(rows.kinds) == 0:  # a loop of its own, which is faster
        for at in range(start, stop):
            found |= rows.indices[at] == sender
        return found
    for at in range(start, stop):
        found |= rows.indices[at] == sender and rows.kinds[at] == rows.kind
    return found


@compiled
def _has_edges(rows: _Rows, senders: Array, receivers: Array, out: Array) -> None:
    for i in range(len(senders)):
        out[i] = _is_edge(rows, senders[i], receivers[i])


@compiled
def _draw_receivers(
    rows: _Rows,
    senders: Array,
    ids: Array,
    first: int,
    bound: int,
    some: Array,
    key: np.uint64,
    out: Array,
    linked_with_all: Array,
) -> None:
    """Candidates are ``first`` and the ``bound - 1`` nodes behind it, or ``some``, if there are any."""
    for i in range(len(senders)):
        for j in range(out.shape[1]):
            node, candidate, tried = -1, -1, 0
            while node < 0 and tried < RANDOM_TRIES + bound:
                at = place_of_try(key, ids[i], j, tried, bound)
                candidate = some[at] if len(some) > 0 else first + at
                is_free = candidate != senders[i]
                if is_free and not _is_edge(rows, senders[i], candidate):
                    node = candidate
                tried += 1
            linked_with_all[i] |= node < 0
            out[i, j] = candidate
