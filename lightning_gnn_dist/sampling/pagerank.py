"""Neighbourhoods by personalised PageRank (Andersen, Chung, Lang, FOCS 2006; ShaDow and PPRGo choose nodes so).

    pi(s) = alpha e(s) + (1 - alpha) pi(s) D^-1 A       where a walk from s ends, at each step with probability alpha

    batch = the graph among the seeds and, for each seed s, the k nodes of largest pi(s)

A push lets alpha of what waits at a node rest there, and hands the other part to its senders in equal shares. Pushes go
on while more than ``eps`` for each sender waits at any node, so that a seed costs at most 1 / (alpha eps) edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import DAMAGED, ZERO, Array, Csr, is_no_row
from lightning_gnn_dist.engine.sample import MAX_ENTRIES, BatchKey, Sample, csr_of, graph_is_damaged
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.rules import Layers, check_fields, whole, within
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.subgraph import induced

FULL = -3  # a kernel returns this if it met more nodes than it has room for
_FREE = -1
_HASH = np.uint64(0x9E3779B97F4A7C15)
_U = np.uint64


class Pushed(NamedTuple):
    """What is known of the nodes that one seed has reached, in the order in which they were met.

    Attributes:
        slots: A hash table with open addressing, of a power of two and at least twice as long as the others: the
            number of a node, or -1.
        nodes: The node's id.
        mass: What has come to rest there.
        rest: What waits to be pushed on.
        queue: A ring of the nodes whose rest is large, the first come first.
        waits: Whether the node is in it.
    """

    slots: Array
    nodes: Array
    mass: Array
    rest: Array
    queue: Array
    waits: Array


def room_for(entries: int) -> Pushed:
    """Room for so many nodes; a power of two."""
    nodes, queue = np.empty((2, entries), np.int64)
    mass, rest = np.empty((2, entries), np.float64)
    return Pushed(np.full(2 * entries, _FREE, np.int64), nodes, mass, rest, queue, np.empty(entries, np.bool_))


@compiled
def most_reached(csr: Csr, seeds: Array, begin: int, alpha: float, eps: float, pushed: Pushed, out: Array) -> Any:
    """Write into each row of ``out`` the nodes that have most of a seed's PageRank, beside the seed.

    Rows begin with ``begin``. What a row has no node for is the seed itself. Return the row at which more room is
    needed, the number of seeds if all are done, or ``DAMAGED``.
    """
    score = np.empty(out.shape[1], np.float64)
    for at in range(begin, len(seeds)):
        count = _push(csr, seeds[at], alpha, eps, pushed)
        if count > 0:
            _choose(seeds[at], count, pushed, score, out[at])
        pushed.slots[:] = _FREE
        if count == DAMAGED:
            return DAMAGED
        if count == FULL:
            return at
    return len(seeds)


@part
def _push(csr: Csr, seed: int, alpha: float, eps: float, pushed: Pushed) -> Any:
    """Push until no rest is larger than ``eps`` for each sender; return how many nodes were met, or an error."""
    last = len(pushed.queue) - 1
    count, first, waiting = _meet(seed, ZERO, pushed), 0, 1
    pushed.rest[0], pushed.waits[0], pushed.queue[0] = 1.0, True, 0
    while waiting > 0:
        own = pushed.queue[first]
        first, waiting = (first + 1) & last, waiting - 1
        node, rest = pushed.nodes[own], pushed.rest[own]
        pushed.waits[own], pushed.rest[own] = False, 0.0
        start, end = csr.indptr[_U(node)], csr.indptr[_U(node + 1)]
        if is_no_row(start, end, len(csr.indices)):
            return DAMAGED
        if start == end:  # a walk that cannot go on stays
            pushed.mass[own] += rest
            continue
        pushed.mass[own] += alpha * rest
        share = (1.0 - alpha) * rest / (end - start)
        for edge in range(start, end):
            sender = np.int64(csr.indices[_U(edge)])
            if _U(sender) >= _U(len(csr.indptr) - 1):
                return DAMAGED
            other = pushed.slots[_slot(sender, pushed)]
            if other == _FREE:
                if count > last:
                    return FULL
                other, count = count, _meet(sender, count, pushed)
            pushed.rest[other] += share
            degree = csr.indptr[_U(sender + 1)] - csr.indptr[_U(sender)]
            if not pushed.waits[other] and pushed.rest[other] > eps * max(degree, 1):
                pushed.queue[(first + waiting) & last] = other
                pushed.waits[other] = True
                waiting += 1
    return count


@part
def _meet(node: Any, count: Any, pushed: Pushed) -> Any:
    """Take a node up as the next one; return how many there are then."""
    pushed.slots[_slot(node, pushed)], pushed.nodes[count] = count, node
    pushed.mass[count], pushed.rest[count], pushed.waits[count] = 0.0, 0.0, False
    return count + 1


@part
def _slot(node: Any, pushed: Pushed) -> Any:
    """The slot of a node, or the free one where it belongs."""
    mask = len(pushed.slots) - 1
    slot = np.int64((_U(node) * _HASH) >> _U(20)) & mask
    while pushed.slots[slot] != _FREE and pushed.nodes[pushed.slots[slot]] != node:
        slot = (slot + 1) & mask
    return slot


@part
def _choose(seed: int, count: int, pushed: Pushed, score: Array, out: Array) -> None:
    """Write the nodes of the largest mass, in falling order; of equal ones the smaller id comes first."""
    found = 0
    for own in range(1, count):
        mass, node = pushed.mass[own], pushed.nodes[own]
        if mass <= 0.0 or (found == len(out) and not _is_before(mass, node, score[found - 1], out[found - 1])):
            continue
        found = min(found + 1, len(out))
        at = found - 1
        while at > 0 and _is_before(mass, node, score[at - 1], out[at - 1]):
            score[at], out[at] = score[at - 1], out[at - 1]
            at -= 1
        score[at], out[at] = mass, node
    out[found:] = seed


@part
def _is_before(mass: float, node: int, other_mass: float, other: int) -> bool:
    return mass > other_mass or (mass == other_mass and node < other)


LEAST = 1e-9  # of eps; below, a seed may take minutes
_ROOM = 1 << 12  # nodes that a seed may reach at first


@dataclass(frozen=True)
class PageRankSampler:
    """Make batches of the nodes that matter most to each seed by personalised PageRank, and all edges among them.

    Nothing is drawn: a batch depends on its seeds alone. Walks go from receivers to senders, however many hops, and all
    edges count alike. The model may have more layers than these nodes are hops away.

    Args:
        num_neighbors: Nodes for each seed, beside itself; fewer where it reaches fewer.
        num_hops: Layers of the model.
        alpha: The probability, at each step of a walk, that it ends. Smaller: farther nodes.
        eps: What may be left out, for each edge of a node. Smaller: more exact, and slower.
    """

    num_neighbors: Annotated[int, whole(1, MAX_ENTRIES)]
    num_hops: Layers
    alpha: Annotated[float, within(0.01, 0.99)] = 0.25
    eps: Annotated[float, within(LEAST, 1)] = 1e-4

    def __post_init__(self) -> None:
        check_fields(self)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [
            induced(graph, ids, self._nodes(graph, ids), batch_key, self.num_hops)
            for ids, batch_key in check_bulk(graph, seeds, keys)
        ]

    def _nodes(self, graph: Graph, seeds: Tensor) -> Tensor:
        """The nodes of all seeds, those of each in a row; ids repeat."""
        csr, ids = csr_of(graph), seeds.numpy()
        out = np.empty((len(ids), min(self.num_neighbors, max(1, graph.num_nodes - 1))), np.int64)
        done, room = 0, _ROOM
        while done < len(ids):
            done = most_reached(csr, ids, done, self.alpha, self.eps, room_for(room), out)
            if done == DAMAGED:
                raise graph_is_damaged(graph)
            room *= 2
        return torch.from_numpy(out.reshape(-1))
