"""Draws false receivers of events: nodes that were there at the time, and to which the sender sent nothing then."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.temporal.order import TimeOrder, time_order
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.hops import edge_types_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES, as_kernels_take, place_of_try


class Candidates(NamedTuple):
    """Nodes that false receivers are drawn from.

    Attributes:
        nodes: Their ids, those that came first to begin with.
        since: Since when each is there, as an integer that compares as its time does; empty where that is not known.
    """

    nodes: range | Tensor
    since: Tensor

    @classmethod
    def of(cls, nodes: range | Tensor, times: Tensor | None, first: int) -> Candidates:
        """Some nodes, and since when each is there, if all nodes of their type, from ``first`` on, have times."""
        if times is None:
            return cls(nodes, torch.empty(0, dtype=torch.int64))
        ids = torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes
        since, order = as_integers(times[ids - first]).sort(stable=True)
        return cls(ids[order], since)

    def ids(self, places: Tensor) -> Tensor:
        """The ids of those at some places."""
        return places + self.nodes.start if isinstance(self.nodes, range) else self.nodes[places]

    def there_by(self, times: Tensor) -> Tensor:
        """How many of the nodes are there at each time."""
        if not self.since.numel():
            return torch.full_like(times, len(self.nodes))
        return torch.searchsorted(self.since, times, right=True)


class _Events(NamedTuple):
    """The edges of a graph by time, as kernels take them.

    Attributes:
        indptr: Where each row starts.
        indices: The senders, row after row.
        kinds: The type of each edge; empty where all are looked at.
        kind: The type to look at.
        times: The times of each row's edges, in order within each type.
        places: Which edge of its row each of these is of; empty if they are in order as they are.
    """

    indptr: Array
    indices: Array
    kinds: Array
    kind: int
    times: Array
    places: Array


def draw_receivers_at(
    graph: Graph,
    time: str,
    events: tuple[Tensor, Tensor],
    ids: Tensor,
    count: int,
    key: np.uint64,
    candidates: Candidates,
    edge_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` nodes for each event, none of them one of its ends or of its sender's receivers at that time.

    A draw is uniform over the nodes that are there by then, and depends on the key and the id alone. Where there is no
    such node any of them is drawn; the second result holds the positions of these events.

    Args:
        graph: The graph whose events to avoid.
        time: The name of their times.
        events: The ends of each event, int64, shape (2, n), and its time.
        ids: A number for each event, so that their draws differ.
        count: Draws for each event.
        key: The key of all these draws.
        candidates: The nodes to draw from.
        edge_type: Of a typed graph, the number of the edge type whose events to avoid.
    """
    ends, rows = events[0].contiguous(), _events(graph, time_order(graph, time), edge_type)
    times = as_integers(events[1])
    out, has_none = np.empty((ids.numel(), count), np.int64), np.zeros(ids.numel(), np.bool_)
    bounds = candidates.there_by(times)
    asked = ends[0].numpy(), ends[1].numpy(), times.numpy(), ids.numpy(), bounds.numpy()
    _draw_receivers_at(rows, *asked, *as_kernels_take(candidates.nodes), key, out, has_none)
    return torch.from_numpy(out), torch.from_numpy(has_none).nonzero().view(-1)


def have_happened(graph: Graph, order: TimeOrder, edges: Tensor, times: Tensor, edge_type: int | None = None) -> Tensor:
    """Whether the graph has each of ``edges``, shape ``(2, n)``, at a time: a bool for each, shape ``(n,)``.

    Args:
        graph: The graph.
        order: Its edges by time.
        edges: Senders and receivers.
        times: The time of each, as an integer.
        edge_type: Of a typed graph the number of the one type to look at. Default: all.
    """
    out = np.empty(times.numel(), np.bool_)
    senders, receivers = edges.to(torch.int64).contiguous().numpy()
    _have_happened(_events(graph, order, edge_type), senders, receivers, times.numpy(), out)
    return torch.from_numpy(out)


def _events(graph: Graph, order: TimeOrder, edge_type: int | None) -> _Events:
    kinds = edge_types_of(None if edge_type is None else graph.types)
    return _Events(graph.indptr.numpy(), graph.indices.numpy(), kinds, edge_type or 0, order.times, order.places)


@compiled
def _have_happened(rows: _Events, senders: Array, receivers: Array, times: Array, out: Array) -> None:
    for i in range(len(senders)):
        out[i] = _happened(rows, senders[i], receivers[i], times[i])


@inlined
def _happened(rows: _Events, sender: int, receiver: int, time: int) -> bool:
    """Whether the sender sent something to the receiver at this time."""
    found = False
    start, stop = max(rows.indptr[receiver], 0), min(rows.indptr[receiver + 1], len(rows.indices))
    for at in range(start, stop):
        if rows.times[at] == time and (len(rows.kinds) == 0 or rows.kinds[at] == rows.kind):
            edge = start + rows.places[at] if len(rows.places) > 0 else at
            found |= rows.indices[edge] == sender
    return found


@compiled
def _draw_receivers_at(
    rows: _Events,
    senders: Array,
    receivers: Array,
    times: Array,
    ids: Array,
    bounds: Array,
    first: int,
    nodes: Array,
    key: np.uint64,
    out: Array,
    has_none: Array,
) -> None:
    for i in range(len(senders)):
        bound = max(bounds[i], 1)
        for j in range(out.shape[1]):
            node, candidate, tried = -1, -1, 0
            while node < 0 and tried < RANDOM_TRIES + bound:
                at = place_of_try(key, ids[i], j, tried, bound)
                candidate = nodes[at] if len(nodes) else first + at
                is_free = candidate != senders[i] and candidate != receivers[i]
                if is_free and not _happened(rows, senders[i], candidate, times[i]):
                    node = candidate
                tried += 1
            has_none[i] |= node < 0 or bounds[i] == 0
            out[i, j] = candidate
