"""Draws negatives: pairs of nodes without an edge, which a link predictor learns to distinguish from edges.

Of edges at times they are nodes that were there at the time, and to which the sender sent nothing then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.kernels import ONE_TYPE, Array
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.engine.sample import edge_types_of
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
from lightning_gnn_dist.graph.graph import Graph

RANDOM_TRIES = 16  # after these, nodes are tried one after the other


class Candidates(NamedTuple):
    """Nodes that false receivers are drawn from.

    Attributes:
        nodes: Their ids, those that came first to begin with.
        since: Since when each is there, if that is known.
    """

    nodes: range | Tensor
    since: Tensor | None = None

    @classmethod
    def of(cls, nodes: range | Tensor, times: Tensor | None, first: int) -> Candidates:
        """Some nodes, and since when each is there, if all nodes of their type, from ``first`` on, have times."""
        if times is None:
            return cls(nodes)
        ids = torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes
        since, order = times[ids - first].long().sort(stable=True)
        return cls(ids[order], since)

    def ids(self, places: Tensor) -> Tensor:
        """The ids of those at some places."""
        return places + self.nodes.start if isinstance(self.nodes, range) else self.nodes[places]

    def there_by(self, times: Tensor) -> Tensor:
        """How many of the nodes are there at each time."""
        if self.since is None:
            return torch.full_like(times, len(self.nodes))
        return torch.searchsorted(self.since, times, right=True)


class Moments(NamedTuple):
    """The times at which edges are looked at: each is there at its own time alone.

    Attributes:
        order: The edges of the graph by time.
        times: When each pair of nodes is looked at.
    """

    order: TimeOrder
    times: Tensor


class _Rows(NamedTuple):
    """Edges to look at, as kernels take them.

    Attributes:
        indptr: Where each row starts.
        indices: The in-neighbours, row after row.
        kinds: The type of each edge; empty where all are looked at.
        kind: The type to look at.
        times: The times of each row's edges, in order within each type; empty where edges are there always.
        places: Which edge of its row each of these is of; empty if they are in order as they are.
    """

    indptr: Array
    indices: Array
    kinds: Array
    kind: int
    times: Array
    places: Array


def draw_receivers(
    graph: Graph,
    ends: Tensor,
    ids: Tensor,
    count: int,
    key: np.uint64,
    candidates: Candidates | None = None,
    edge_type: int | None = None,
    at: Moments | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` nodes for each edge, none of them one of its ends or a receiver of its sender, shape (n, count).

    A draw is uniform over the nodes that are there, and depends on the key and the id alone, not on other draws. Where
    there is no such node any of them is drawn; the second result holds the positions of these edges.

    Args:
        graph: The graph whose edges to avoid.
        ends: The sender of each edge, and what other nodes not to draw, int64, shape (k, n).
        ids: A number for each edge, so that their draws differ.
        count: Draws for each edge.
        key: The key of all these draws.
        candidates: The nodes to draw from. Default: all.
        edge_type: Of a typed graph, the number of the edge type whose edges to avoid. Default: those of all types.
        at: The time of each edge; then only edges of that time are avoided. Default: all are.
    """
    out, has_none = np.empty((ids.numel(), count), np.int64), np.zeros(ids.numel(), np.bool_)
    candidates = Candidates(range(graph.num_nodes)) if candidates is None else candidates
    bounds = candidates.there_by(ids if at is None else at.times).numpy()
    asked = np.ascontiguousarray(ends.numpy()), _times(at), ids.numpy(), bounds
    _draw_receivers(_rows(graph, edge_type, at), *asked, *_as_kernels_take(candidates.nodes), key, out, has_none)
    return torch.from_numpy(out), torch.from_numpy(has_none).nonzero().view(-1)


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


def has_edges(graph: Graph, edges: Tensor, edge_type: int | None = None, at: Moments | None = None) -> Tensor:
    """Whether the graph has each of ``edges``, shape ``(2, n)``: a bool for each, shape ``(n,)``.

    Args:
        graph: The graph.
        edges: Senders and receivers.
        edge_type: Of a typed graph the number of the one type to look at. Default: all.
        at: When each must be there. Default: at any time.
    """
    out = np.empty(edges.shape[1], np.bool_)
    senders, receivers = edges.to(torch.int64).contiguous().numpy()
    _has_edges(_rows(graph, edge_type, at), senders, receivers, _times(at), out)
    return torch.from_numpy(out)


def _as_kernels_take(candidates: range | Tensor) -> tuple[int, Array]:
    """The first of the candidates if they follow each other, and otherwise all of them."""
    if isinstance(candidates, range):
        return candidates.start, np.empty(0, np.int64)
    return 0, candidates.numpy()


def _times(at: Moments | None) -> Array:
    return np.empty(0, np.int64) if at is None else at.times.numpy()


def _rows(graph: Graph, edge_type: int | None, at: Moments | None) -> _Rows:
    """The graph as kernels take it."""
    kinds = ONE_TYPE if edge_type is None else edge_types_of(graph.types)
    by_time = (np.empty(0, np.int64), np.empty(0, np.int32)) if at is None else (at.order.times, at.order.places)
    return _Rows(graph.indptr.numpy(), graph.indices.numpy(), kinds, edge_type or 0, *by_time)


@inlined
def _place_of_try(key: np.uint64, number: int, draw_of_sender: int, tried: int, bound: int) -> int:
    """Which of the candidates a try is."""
    last = min(tried, RANDOM_TRIES - 1)
    return (below(draw(key, number, draw_of_sender * RANDOM_TRIES + last), bound) + tried - last) % bound


@compiled
def _tried_places(keys: Array, ids: Array, draws: Array, bounds: Array, begin: int, out: Array) -> None:
    for i in range(len(ids)):
        for tried in range(out.shape[1]):
            out[i, tried] = _place_of_try(keys[i], ids[i], draws[i], begin + tried, bounds[i])


@inlined
def _is_there(rows: _Rows, sender: int, receiver: int, times: Array, i: int) -> bool:
    """Whether there is such an edge; if there are times, at the ``i``-th."""
    found = False
    start, stop = max(rows.indptr[receiver], 0), min(rows.indptr[receiver + 1], len(rows.indices))
    if len(times) == 0:  # a loop of its own, which is faster
        for at in range(start, stop):
            found |= rows.indices[at] == sender and (len(rows.kinds) == 0 or rows.kinds[at] == rows.kind)
        return found
    for at in range(start, stop):
        if rows.times[at] == times[i] and (len(rows.kinds) == 0 or rows.kinds[at] == rows.kind):
            edge = start + rows.places[at] if len(rows.places) > 0 else at
            found |= rows.indices[edge] == sender
    return found


@compiled
def _has_edges(rows: _Rows, senders: Array, receivers: Array, times: Array, out: Array) -> None:
    for i in range(len(senders)):
        out[i] = _is_there(rows, senders[i], receivers[i], times, i)


@compiled
def _draw_receivers(
    rows: _Rows,
    ends: Array,
    times: Array,
    ids: Array,
    bounds: Array,
    first: int,
    some: Array,
    key: np.uint64,
    out: Array,
    has_none: Array,
) -> None:
    """Candidates are ``first`` and the nodes behind it, or ``some``, if there are any: of each edge the first few."""
    for i in range(len(ids)):
        bound = max(bounds[i], 1)
        for j in range(out.shape[1]):
            node, candidate, tried = -1, -1, 0
            while node < 0 and tried < RANDOM_TRIES + bound:
                at = _place_of_try(key, ids[i], j, tried, bound)
                candidate = some[at] if len(some) > 0 else first + at
                is_free = True
                for k in range(len(ends)):
                    is_free &= candidate != ends[k, i]
                if is_free and not _is_there(rows, ends[0, i], candidate, times, i):
                    node = candidate
                tried += 1
            has_none[i] |= node < 0 or bounds[i] == 0
            out[i, j] = candidate
