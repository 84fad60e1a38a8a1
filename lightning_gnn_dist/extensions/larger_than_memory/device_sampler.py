"""Sampling on the device of the graph's tensors: all batches of a bulk share the launches of a hop.

They are one graph: node ``v`` of batch ``i`` of ``k`` has the id ``i * n + v``. How many nodes and edges a hop finds is
known on the device alone, until the host asks once for the counts of all hops. So arrays are as long as they could have
to be, and what stands behind their numbers belongs to a batch ``k`` that does not exist, whose only node has the id
``k * n``.

Torch operators draw by the random words of the compiled loops. int64 arithmetic wraps as uint64 does; only a shift to
the right has to clear the copies of the sign. Sums of layer-wise draws are added up in another order than there, so
weights may differ in their last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.weighted import checked_weights
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.base import Sampler, check_bulk
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler, LayerSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

MAX_EDGES = 2**31 - 1  # of one hop of all batches
UNSEEN, SEEN = 2**31 - 1, -(2**31)  # entry of a new node; bit that marks the position of a known one in its batch


class Edges(NamedTuple):
    """The edges of one hop, sorted by ``row``, and behind them any number of entries of the frontier's last row.

    Attributes:
        row: The receiver's position in the frontier.
        column: The sender, a node of the graph.
        position: The edge's position in the graph's ``indices``.
        weight: The edge's weight, or None.
    """

    row: Tensor
    column: Tensor
    position: Tensor
    weight: Tensor | None


class Stack:
    """Grows all batches of a bulk by a hop at a time, in torch operators; many take as many launches as one.

    A table tells which nodes a batch has: it has an int32 for each node of the graph and each batch.

    Args:
        seeds: The first nodes of each batch, as ``check_bulk`` returns them.
        num_nodes: Nodes of the graph.
        device: Where the graph is. Default: where the seeds are.

    Attributes:
        batch: The batch of each node of the frontier, the nodes that were found last, in increasing order. Those of
            the last entry, and of some before it, are of the batch ``num_batches`` and do not exist.
        nodes: The ids of the nodes of the frontier; 0 for those that do not exist.
    """

    batch: Tensor
    nodes: Tensor

    def __init__(self, seeds: Sequence[Tensor], num_nodes: int, device: torch.device | None = None) -> None:
        self._seeds = seeds
        self.num_batches, self.num_nodes = len(seeds), num_nodes
        self._nowhere = len(seeds) * num_nodes  # the id of what does not exist
        device = seeds[0].device if device is None else device
        self._table = torch.full((self._nowhere + 1,), UNSEEN, dtype=torch.int32, device=device)
        self._table[self._nowhere :].fill_(SEEN)
        self._starts = (torch.arange(len(seeds) + 2, device=device) * num_nodes).clamp_(max=self._nowhere + 1)
        self._found = torch.zeros(len(seeds) + 1, dtype=torch.int64, device=device)
        self._nodes: list[Tensor] = []
        self._degrees: list[Tensor] = []
        self._columns: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._counts: list[Tensor] = []  # of nodes and edges in turn, one number for each batch
        self._enter(sent(torch.cat([ids + i * num_nodes for i, ids in enumerate(seeds)]), device))

    def grow(self, edges: Edges) -> None:
        """Add a hop: the edges of the frontier, and those of their senders that are new."""
        if edges.row.numel() > MAX_EDGES:
            raise ValueError(
                f"The batches of a bulk may have {MAX_EDGES} edges a hop, but these can have {edges.row.numel()}. "
                "Use fewer seeds a batch, or a smaller bulk_size."
            )
        starts = torch.searchsorted(edges.row, torch.arange(self.nodes.numel(), device=edges.row.device))
        batch = self.batch[edges.row]
        self._degrees.append(starts.diff())
        self._counts.append(torch.searchsorted(batch, torch.arange(len(self._starts), device=batch.device)).diff())
        self._positions.append(edges.position)
        if edges.weight is not None:
            self._weights.append(edges.weight.to(torch.float32))
        ids = (batch * self.num_nodes + edges.column).clamp_(max=self._nowhere)
        self._enter(ids)
        self._columns.append(self._table[ids] ^ SEEN)

    def trim(self) -> None:
        """Leave out of the frontier what does not exist, but for the last entry. The host waits for the device."""
        size = int((self.batch < self.num_batches).sum()) + 1
        self.batch, self.nodes = self.batch[:size], self.nodes[:size]

    def _enter(self, ids: Tensor) -> None:
        """Give each new id the next position in its batch, and make the new nodes the frontier."""
        order = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
        self._table.scatter_reduce_(0, ids, order, "amin")  # entries of known nodes are negative, and stay
        is_new = self._table[ids] == order
        new = packed(ids, is_new, self._nowhere, min(ids.numel(), self._nowhere))
        count = torch.searchsorted(new, self._starts).diff()
        self.batch = new // self.num_nodes
        self.nodes = new - self._starts[self.batch]
        before = count.cumsum(0) - count
        position = torch.arange(new.numel(), device=ids.device) + (self._found - before)[self.batch]
        self._table[new] = position.to(torch.int32) ^ SEEN
        self._found[:-1] += count[:-1]
        self._nodes.append(self.nodes)
        self._counts.append(count)

    def samples(self, *, with_ids: bool) -> list[Sample]:
        """The batches, each in arrays of its own."""
        counts = torch.stack(self._counts)[:, :-1].tolist()  # here the host waits, once for all hops
        num_nodes, num_edges = counts[::2], counts[1::2]
        for ids, count in zip(self._seeds, num_nodes[0], strict=True):
            if count < ids.numel():
                refuse_repeated(ids)
        nodes, degrees = _dealt(self._nodes, num_nodes), _dealt(self._degrees, num_nodes[:-1])
        columns, positions = _dealt(self._columns, num_edges), _dealt(self._positions, num_edges)
        weights = _dealt(self._weights, num_edges)
        zero = self._starts[:1]
        return [
            Sample(
                nodes=torch.cat(nodes[i]),
                indptr=torch.cat([zero, *degrees[i]]).cumsum(0, dtype=torch.int32),
                indices=torch.cat(columns[i]),
                num_sampled_nodes=[hop[i] for hop in num_nodes],
                num_sampled_edges=[hop[i] for hop in num_edges],
                edge_ids=torch.cat(positions[i]) if with_ids else None,
                edge_weight=torch.cat(weights[i]) if weights else None,
            )
            for i in range(self.num_batches)
        ]


def _dealt(hops: list[Tensor], counts: list[list[int]]) -> list[list[Tensor]]:
    """For each batch, its piece of every hop's tensor, as views."""
    if not hops:
        return []
    pieces = [hop[: sum(sizes)].split(sizes) for hop, sizes in zip(hops, counts, strict=True)]
    return [list(of_batch) for of_batch in zip(*pieces, strict=True)]


def packed(values: Tensor, is_kept: Tensor, filler: int, room: int) -> Tensor:
    """The kept values in their order, of which there are at most ``room``, and fillers up to ``room + 1`` numbers."""
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, room)
    return values.new_full((room + 1,), filler).scatter_(0, place, torch.where(is_kept, values, filler))


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


_NODE, _STEP = _signed(0xD1342543DE82EF95), _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def keys_of(batch_keys: Sequence[BatchKey], num_hops: int, device: torch.device) -> Tensor:
    """The key of each hop in each batch, int64, shape (num_hops, k + 1); the last batch does not exist."""
    keys = [typed_keys(*batch_key, num_hops, 1) for batch_key in batch_keys]
    words = np.concatenate([*keys, np.zeros((num_hops, 1), np.uint64)], axis=1).view(np.int64)
    return sent(torch.from_numpy(words), device)


def draw(keys: Tensor, nodes: Tensor, i: Tensor | int) -> Tensor:
    """The ``i``-th random word of each node under its key; the arguments broadcast."""
    step = _STEP * i if isinstance(i, Tensor) else _signed(_STEP * i)
    return _mix_(_mix_(keys + _NODE * nodes) + step)


def unit(words: Tensor) -> Tensor:
    """Numbers in ``[0, 1)``, float64."""
    return _shift(words, 11).to(torch.float64).mul_(2.0**-53)


def below(words: Tensor, bound: Tensor) -> Tensor:
    """Numbers in ``[0, bound)``; ``bound`` must not exceed ``2**31``."""
    return (_shift(words, 32) * bound) >> 32


def _mix_(words: Tensor) -> Tensor:
    words.bitwise_xor_(_shift(words, 30)).mul_(_MIX_1)
    words.bitwise_xor_(_shift(words, 27)).mul_(_MIX_2)
    return words.bitwise_xor_(_shift(words, 31))


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class Frontier(NamedTuple):
    """The rows of a stack's frontier. Those of nodes that do not exist are empty.

    Attributes:
        key: The key under which each row draws.
        node: The node that the row belongs to.
        first: Where the row starts in the graph's ``indices``.
        degree: The length of the row.
    """

    key: Tensor
    node: Tensor
    first: Tensor
    degree: Tensor

    @classmethod
    def of(cls, graph: Graph, stack: Stack, keys: Tensor) -> Frontier:
        first = graph.indptr[stack.nodes]
        degree = (graph.indptr[stack.nodes + 1] - first) * (stack.batch < stack.num_batches)
        return cls(keys[stack.batch], stack.nodes, first, degree)


def every_edge(rows: Frontier) -> tuple[Tensor, Tensor]:
    """All edges of the rows: each one's row, and its position in the graph's ``indices``."""
    upto = rows.degree.cumsum(0)
    total = int(upto[-1]) if upto.numel() else 0
    at = torch.arange(total, device=upto.device)
    row = torch.arange(upto.numel(), device=upto.device).repeat_interleave(rows.degree, output_size=total)
    return row, at + (rows.first - upto + rows.degree)[row]


def drawn_edges(rows: Frontier, size: int, *, replace: bool) -> tuple[Tensor, Tensor]:
    """Draw ``size`` edges of each row, or take all of a shorter one; return as :func:`every_edge` does.

    With a size, the edges are followed by fillers of the last row, which must be empty, up to ``size`` for each row
    before it. So the host need not know how many there are.

    Args:
        rows: The rows to draw from, of a graph that has edges.
        size: Edges per row; -1 takes all.
        replace: Whether an edge may be drawn more than once; then a short row draws ``size`` edges, too.
    """
    if size < 0:
        return every_edge(rows)
    in_order = torch.arange(size, device=rows.node.device)
    keys, nodes, degrees = rows.key[:, None], rows.node[:, None], rows.degree[:, None]
    if replace:
        slots = below(draw(keys, nodes, in_order), degrees)
    else:
        slots = torch.where(degrees > size, distinct(keys, nodes, degrees, size), in_order)
    taken = in_order < torch.where(degrees > (0 if replace else size), size, degrees)
    room = (rows.node.numel() - 1) * size
    entries = torch.arange(room + size, device=rows.node.device)
    chosen = packed(entries, taken.view(-1), room, room)[:room]
    return chosen // size, (rows.first[:, None] + slots).view(-1)[chosen]


def distinct(keys: Tensor, nodes: Tensor, degrees: Tensor, size: int) -> Tensor:
    """``size`` distinct slots of each row, by Floyd's algorithm. Those of a row shorter than ``size`` mean nothing."""
    step = torch.arange(size, device=nodes.device)
    last = degrees - size + step
    chosen = below(draw(keys, nodes, step), last + 1)
    for i in range(1, size):
        slot = chosen[:, i : i + 1]
        is_taken = (chosen[:, :i] == slot).any(1, keepdim=True)
        chosen[:, i : i + 1] = torch.where(is_taken, last[:, i : i + 1], slot)
    return chosen


def drawn_layer(
    graph: Graph, stack: Stack, rows: Frontier, size: int, importance: Tensor | None, weights: Tensor | None
) -> tuple[Edges, Tensor]:
    """Draw nodes; return the frontier's edges from them, with their weights, and the sum that each row has in A.

    Args:
        graph: The graph.
        stack: The batches.
        rows: The rows of its frontier.
        size: Nodes to draw for each batch, on average.
        importance: The importance of each node of the graph, float64, or None for its squared column norm in the
            frontier's rows of A.
        weights: The entries of A, float32 in the order of the graph's edges, or None for 1 / in-degree of the receiver.
    """
    row, position = every_edge(rows)
    column = graph.indices[position].to(torch.int64)
    value = rows.degree[row] if weights is None else weights[position]
    value = 1.0 / value.to(torch.float64) if weights is None else value.to(torch.float64)
    if importance is None:
        shape = stack.num_batches, stack.num_nodes
        ids = stack.batch[row] * stack.num_nodes + column
        norms = value.new_zeros(shape[0] * shape[1]).index_add_(0, ids, value.square())
        factor, norm = scales(norms.view(shape), size)[stack.batch[row]], norms[ids]
    else:
        factor, norm = scales(importance[None], size), importance[column]
    chance = torch.where(norm > 0, (factor * norm).clamp(max=1), 0.0)
    kept = (unit(draw(rows.key[row], column, 0)) < chance).nonzero().view(-1)
    whole = value.new_zeros(rows.node.numel()).index_add_(0, row, value)
    return Edges(row[kept], column[kept], position[kept], value[kept] * (1.0 / chance[kept])), whole


def normalized(edges: Edges, whole: Tensor) -> Edges:
    """Scale the weights of each row to the sum that the row has in A."""
    assert edges.weight is not None
    total = torch.zeros_like(whole).index_add_(0, edges.row, edges.weight)
    share = torch.where(total > 0, whole / total, 1.0)[edges.row]
    return edges._replace(weight=edges.weight.to(torch.float32) * share)


def column_norms(graph: Graph, weights: Tensor | None) -> Tensor:
    """The squared norm of each column of A, float64, shape (N,)."""
    degrees = graph.indptr.diff()
    value = 1.0 / degrees.to(torch.float64).repeat_interleave(degrees) if weights is None else weights
    return value.new_zeros(degrees.numel(), dtype=torch.float64).index_add_(
        0, graph.indices.to(torch.int64), value.to(torch.float64).square()
    )


def scales(importance: Tensor, size: int) -> Tensor:
    """The factor with which each row's ``min(1, factor * row)`` sums to ``size``; infinite if no more are above 0."""
    factor = importance.new_zeros(importance.size(0))
    previous = factor - 1
    while bool((factor > previous).any()):  # an entry that reaches 1 takes no more, so the factor of the others grows
        is_certain, previous = factor[:, None] * importance >= 1, factor
        room, mass = size - is_certain.sum(1), importance.masked_fill(is_certain, 0.0).sum(1)
        factor = torch.where((room > 0) & (mass > 0), (room / mass).maximum(factor), factor)
    return factor.masked_fill((importance > 0).sum(1) <= size, torch.inf)


PADDED = 1 << 23  # edges that a hop may have room for, 100 bytes each, without knowing how many there are
KINDS = "NeighborSampler without weight, LadiesSampler, FastGCNSampler"
NODES_AT_ONCE = 1 << 27  # nodes of the graph times batches sampled together: 4 bytes each, 40 in layer-wise sampling


@runtime_checkable
class DrawsAround(Protocol):
    """A sampler that finds seeds for another, as one of edges does for their ends."""

    @property
    def sampler(self) -> Sampler:
        """What draws around them."""

    def drawn_by(self, sampler: Sampler, rows: Graph) -> Sampler:
        """Return the same around which another draws; what it asks of the graph itself it asks of ``rows`` in RAM."""


def draws_anywhere(sampler: Sampler) -> bool:
    """Whether a :class:`DeviceSampler` can draw its batches, or, for links, their neighbourhoods."""
    nodes = sampler.sampler if isinstance(sampler, DrawsAround) else sampler
    if type(nodes) is NeighborSampler:  # a subclass may draw otherwise
        return nodes.weight is None
    return type(nodes) in (LadiesSampler, FastGCNSampler)


def drawn_there(sampler: Sampler, home: Graph) -> Sampler:
    """A sampler that draws the same batches from a copy of ``home`` on a device.

    The targets of links are drawn in RAM, few numbers for each, and only their neighbourhoods on the device.
    """
    if isinstance(sampler, DrawsAround):
        return sampler.drawn_by(drawn_there(sampler.sampler, home), home)
    return DeviceSampler(sampler)  # type: ignore[arg-type]  # it checks the type itself


@dataclass(frozen=True)
class DeviceSampler:
    """The batches of another sampler, drawn in torch operators on the device of the graph's tensors.

    Made for a graph on a GPU. Nodes, edges and their order are exactly those of the compiled sampler; edge weights may
    differ in the last digit. It takes 4 bytes for each node of the graph and each batch sampled together, at most 2**27
    of these at a time. On a CPU it is several times slower.

    The host waits for a GPU once for all batches sampled together, and further for

    - each hop of a ``NeighborSampler`` that takes all neighbours (-1), once; and each hop that could have over 2**23
      edges, once;
    - each hop of the other samplers, once for its edges, once for those kept, and once for each rescaling of chances.

    Args:
        sampler: A ``NeighborSampler`` that draws all neighbours equally likely, a ``LadiesSampler`` or a
            ``FastGCNSampler``.
    """

    sampler: NeighborSampler | LayerSampler

    def __post_init__(self) -> None:
        if isinstance(self.sampler, DrawsAround) or not draws_anywhere(self.sampler):
            raise TypeError(f"On a device the sampler must be one of {KINDS}, got {shown(self.sampler)}.")

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk, samples = check_bulk(graph, seeds, keys, untyped="DeviceSampler"), list[Sample]()
        remembered(graph, DeviceSampler, graph.check_edges)  # an index out of range ends a CUDA context
        size = max(1, NODES_AT_ONCE // max(1, graph.num_nodes))
        for start in range(0, len(bulk), size):
            of_seeds, batch_keys = zip(*bulk[start : start + size], strict=True)
            stack = Stack(of_seeds, graph.num_nodes, graph.indices.device)
            for hop, keys_of_hop in enumerate(keys_of(batch_keys, self.num_hops, graph.indices.device)):
                stack.grow(self._hop(graph, stack, keys_of_hop, hop))
            samples += stack.samples(with_ids=bool(graph.edge_arrays))
        return samples

    def _hop(self, graph: Graph, stack: Stack, keys: Tensor, hop: int) -> Edges:
        sampler = self.sampler
        if isinstance(sampler, NeighborSampler):
            size = sampler.per_hop[hop] if graph.num_edges else -1
            if stack.nodes.numel() * size > PADDED:
                stack.trim()
            row, position = drawn_edges(Frontier.of(graph, stack, keys), size, replace=sampler.replace)
            return Edges(row, graph.indices[position], position, None)
        name, norms = sampler.weight, None
        weights = None if name is None else checked_weights(graph, name)
        if isinstance(sampler, FastGCNSampler):
            norms = remembered(graph, ("column norms", name), lambda: column_norms(graph, weights))
        rows = Frontier.of(graph, stack, keys)
        edges, whole = drawn_layer(graph, stack, rows, sampler.num_nodes[hop], norms, weights)
        return normalized(edges, whole) if sampler.normalize else edges
