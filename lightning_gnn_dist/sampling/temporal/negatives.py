"""Draws false receivers of events: nodes that were there at the time, and to which the sender sent nothing then."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.engine.temporal.order import time_order
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.hops import edge_types_of
from lightning_gnn_dist.graph.graph import Graph

_TRIES = 16  # random draws; after these, nodes are tried one after the other


class Candidates(NamedTuple):
    """Nodes that false receivers are drawn from.

    Attributes:
        nodes: Their ids, int64, those that came first to begin with.
        since: Since when each is there, as an integer that compares as its time does; empty where that is not known.
    """

    nodes: Tensor
    since: Tensor

    @classmethod
    def of(cls, graph: Graph, nodes: range | Tensor, times: Tensor | None, node_type: str | None) -> Candidates:
        """Some nodes of a type, and since when each of them is there, if all nodes of the type have times."""
        ids = torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes
        if times is None:
            return cls(ids, torch.empty(0, dtype=torch.int64))
        first = 0 if graph.types is None or node_type is None else graph.types.nodes_of(node_type).start
        since, order = as_integers(times[ids - first]).sort(stable=True)
        return cls(ids[order], since)

    def there_by(self, times: Tensor) -> Tensor:
        """How many of the nodes are there at each time."""
        if not self.since.numel():
            return torch.full_like(times, self.nodes.numel())
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
    ends, order = events[0].contiguous(), time_order(graph, time)
    times = as_integers(events[1])
    out, has_none = np.empty((ids.numel(), count), np.int64), np.zeros(ids.numel(), np.bool_)
    kinds = np.empty(0, np.uint8) if graph.types is None or edge_type is None else edge_types_of(graph.types)
    rows = _Events(graph.indptr.numpy(), graph.indices.numpy(), kinds, edge_type or 0, order.times, order.places)
    bounds = candidates.there_by(times)
    asked = ends[0].numpy(), ends[1].numpy(), times.numpy(), ids.numpy(), bounds.numpy()
    _draw_receivers_at(rows, *asked, candidates.nodes.numpy(), key, out, has_none)
    return torch.from_numpy(out), torch.from_numpy(has_none).nonzero().view(-1)


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
    nodes: Array,
    key: np.uint64,
    out: Array,
    has_none: Array,
) -> None:
    for i in range(len(senders)):
        bound = max(bounds[i], 1)
        for j in range(out.shape[1]):
            node, candidate, tried, at = -1, -1, 0, 0
            while node < 0 and tried < _TRIES + bound:
                at = below(draw(key, ids[i], j * _TRIES + tried), bound) if tried < _TRIES else (at + 1) % bound
                candidate = nodes[at]
                is_free = candidate != senders[i] and candidate != receivers[i]
                if is_free and not _happened(rows, senders[i], candidate, times[i]):
                    node = candidate
                tried += 1
            has_none[i] |= node < 0 or bounds[i] == 0
            out[i, j] = candidate
