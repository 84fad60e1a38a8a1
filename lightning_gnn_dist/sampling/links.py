"""Batches of edges: some edges, negatives or labels for each, and the neighbourhoods of all ends without the edges.

A model that is asked whether an edge exists must not receive messages along it, in either direction. Both ends of every
target are seeds, so the edges to remove are in the rows of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.negatives import Candidates, draw_receivers

# They take the place of the hop in a key, so that these draws and those of a sampler never share one.
FALSE_ENDS, DIRECTION = -1, -2


class TargetType(NamedTuple):
    """The edge type of the targets in a graph with types.

    Attributes:
        number: Its place among the edge types.
        reverse: The place of the edge type that has the same links turned round, if there is one.
    """

    number: int
    reverse: int | None = None

    def shows(self, graph: Graph, sample: Sample) -> Tensor:
        """Which edges of a sample could give a target away: a bool for each."""
        return self.is_shown(kinds_of(graph, sample))

    def is_shown(self, kinds: Tensor) -> Tensor:
        """Which edges could, given their types."""
        is_shown = kinds == self.number
        return is_shown if self.reverse is None else is_shown | (kinds == self.reverse)

    @property
    def numbers(self) -> list[int]:
        """The places of both edge types."""
        return [self.number] if self.reverse is None else [self.number, self.reverse]


@dataclass(frozen=True, eq=False)
class LinkSampler:
    """Samples around edges of the graph. Its seeds are positions in ``graph.indices``.

    A batch's targets are its edges, then their negatives; ``edge_label_index`` holds the positions of both ends in the
    batch, ``edge_label`` ones and zeros, or the label of each edge. The targets are removed from the sampled
    neighbourhoods, in both directions.

    Args:
        sampler: Draws the neighbourhoods of the ends.
        num_negatives: Negatives for each edge: receivers to which the sender has no edge.
        candidates: The nodes that negatives are drawn from.
        undirected: Draw at random which direction of each edge is the target.
        target_type: The edge type of the targets, if the graph has types.
        home: The graph in RAM to look up edges and draw negatives in, if the sampled graph is a copy on a device.
        carried: What batches say of their targets, ``edge_label`` among it: a row for each edge of the target type.
            None: labels are ones and zeros.
        hides: Whether targets are removed.
    """

    sampler: Sampler
    num_negatives: int
    candidates: range | Tensor
    undirected: bool
    target_type: TargetType | None = None
    home: Graph | None = None
    carried: Mapping[str, Tensor] | None = None
    hides: bool = True

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        home = graph if self.home is None else self.home
        pairs = [self._pairs(home, ids, batch_key) for ids, batch_key in zip(seeds, keys, strict=True)]
        found = around(graph, self.sampler, pairs, keys)
        return [self.finished(graph, *drawn, ids, home) for ids, drawn in zip(seeds, found, strict=True)]

    def finished(self, graph: Graph, sample: Sample, ends: Tensor, ids: Tensor, home: Graph) -> Sample:
        """The sample around the ends of targets, without the targets if they are hidden, and with what is said of them.

        Args:
            graph: What was sampled.
            sample: The sample.
            ends: Where the ends of all targets are in it.
            ids: The positions of the targets that are edges.
            home: The graph that these are positions in.
        """
        if self.hides:
            sample = without_targets(graph, sample, ends[:, : ids.numel()], self.target_type)
        return labelled(sample, ends, ids.numel(), self.target_type, self._of_targets(home, ids))

    def false_ends(self, graph: Graph, senders: Tensor, ids: Tensor, batch_key: BatchKey) -> Tensor:
        """The receivers of the negatives of each edge, shape ``(n, num_negatives)``."""
        key_of_batch, kind = key(*batch_key, FALSE_ENDS), self.target_type and self.target_type.number
        drawn = senders[None], ids, self.num_negatives, key_of_batch, Candidates(self.candidates), kind
        return draw_receivers(graph, *drawn)[0]

    def _of_targets(self, home: Graph, ids: Tensor) -> Mapping[str, Tensor] | None:
        if self.carried is None:
            return None
        return rows_at(self.carried, ids if self.target_type is None else places_of(home, self.target_type.number, ids))

    def _pairs(self, graph: Graph, ids: Tensor, batch_key: BatchKey) -> Tensor:
        edges = directed(edges_at(graph, ids), ids, batch_key, self.undirected)
        return targets(edges, self.false_ends(graph, edges[0], ids, batch_key))


@dataclass(frozen=True, eq=False)
class HeldLinkSampler:
    """Samples around edges that were held out, and their fixed negatives. Its seeds are columns of ``edges``.

    Args:
        sampler: Draws the neighbourhoods of the ends.
        edges: The edges that were held out of the graph, shape ``(2, n)``.
        negatives: The receivers of each edge's negatives, shape ``(n, K)``.
        target_type: The edge type of the edges, if the graph has types.
        first: The ids in the graph of the nodes that count as 0 among senders, and among receivers.
        carried: As those of :class:`LinkSampler`, with a row for each of ``edges``.
    """

    sampler: Sampler
    edges: Tensor
    negatives: Tensor
    target_type: TargetType | None = None
    first: tuple[int, int] = (0, 0)
    carried: Mapping[str, Tensor] | None = None

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        samples = around(graph, self.sampler, [self.pairs(ids) for ids in seeds], keys)
        return [self.finished(*found, ids) for ids, found in zip(seeds, samples, strict=True)]

    def finished(self, sample: Sample, ends: Tensor, ids: Tensor) -> Sample:
        """The sample around the ends of targets, with what is said of them."""
        return labelled(sample, ends, ids.numel(), self.target_type, self._of_targets(ids))

    def ends(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The nodes that a batch of some edges needs, in increasing order, and its ``edge_label_index`` and labels."""
        nodes, positions = ends_of_pairs(self.pairs(ids))
        return nodes, labels(positions, ids.numel(), self._of_targets(ids))

    def _of_targets(self, ids: Tensor) -> Mapping[str, Tensor] | None:
        return None if self.carried is None else rows_at(self.carried, ids)

    def pairs(self, ids: Tensor) -> Tensor:
        """The ends of all targets of a batch of some edges, shape ``(2, m)``."""
        edges, negatives = self.edges[:, ids].to(torch.int64), self.negatives[ids].to(torch.int64)
        first = torch.tensor(self.first, device=edges.device)[:, None]
        return targets(edges + first, negatives + self.first[1])


def positions_of_links(
    graph: Graph,
    owner: Tensor,
    undirected: bool,
    target_type: TargetType | None = None,
    *,
    loops: bool = False,
    across: bool = False,
) -> Tensor:
    """The positions in ``indices`` of the edges whose two ends have the same owner.

    Args:
        graph: The graph that has the edges.
        owner: A number for every node; nodes with a negative one have no owner.
        undirected: Whether the graph has every edge in both directions; then only one of them is returned.
        target_type: Of a graph with types, the one whose edges are returned.
        loops: Whether self-loops are returned, too.
        across: Whether edges are returned whose receiver alone has an owner, or another one than the sender.
    """

    def is_chosen(sender: Tensor, receiver: Tensor) -> Tensor:
        is_inside = ((owner[sender] == owner[receiver]) | across) & (owner[receiver] >= 0)
        return is_inside & are_links(sender, receiver, undirected, loops=loops)

    return positions_where(graph, is_chosen, target_type)


def are_links(sender: Tensor, receiver: Tensor, undirected: bool, *, loops: bool) -> Tensor:
    """Which edges are asked for, by their ends: one direction of each, where there are both."""
    return (sender < receiver if undirected else sender != receiver) | ((sender == receiver) & loops)


def positions_where(
    graph: Graph, is_chosen: Callable[[Tensor, Tensor], Tensor], target_type: TargetType | None = None
) -> Tensor:
    """The positions in ``indices`` of edges that are chosen by their senders and receivers, a bool for each."""
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        positions = torch.arange(start, min(start + EDGES_AT_ONCE, graph.num_edges))
        if target_type is not None and graph.types is not None:
            positions = positions[graph.types.edge_type[positions] == target_type.number]
        found.append(positions[is_chosen(*edges_at(graph, positions))])
    return torch.cat(found)


def edges_at(graph: Graph, positions: Tensor) -> Tensor:
    """Senders and receivers of the edges at these positions, shape ``(2, n)``."""
    receivers = torch.searchsorted(graph.indptr, positions, right=True) - 1
    return torch.stack([graph.indices[positions].to(torch.int64), receivers])


def directed(edges: Tensor, ids: Tensor, batch_key: BatchKey, undirected: bool) -> Tensor:
    """The edges, shape ``(2, n)``; if ``undirected``, each has its ends swapped at random."""
    if not undirected:
        return edges
    return torch.where(draw_bits(key(*batch_key, DIRECTION), ids), edges.flip(0), edges)


def targets(edges: Tensor, negatives: Tensor) -> Tensor:
    """All targets, shape ``(2, n + n * K)``: the edges, then the first edge's K negatives, and so on."""
    senders = edges[0].repeat_interleave(negatives.shape[1])
    return torch.cat([edges, torch.stack([senders, negatives.reshape(-1)])], dim=1)


def ends_of_pairs(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ends of some pairs, sorted, an order that every sampler keeps, and where each end is among them."""
    nodes, positions = pairs.unique(return_inverse=True)
    return nodes, positions


def around(
    graph: Graph, sampler: Sampler, pairs: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[tuple[Sample, Tensor]]:
    """For each batch, a sample around the ends of its pairs, and the positions of these ends in it, shape (2, m)."""
    found = [ends_of_pairs(ends) for ends in pairs]
    samples = sampler.sample_bulk(graph, [seeds for seeds, _ in found], keys)
    return [(sample, ends.to(sample.nodes.device)) for sample, (_, ends) in zip(samples, found, strict=True)]


def kinds_of(graph: Graph, sample: Sample) -> Tensor:
    """The type of each edge of a sample of a typed graph."""
    if sample.edge_kinds is not None:
        return sample.edge_kinds
    assert graph.types is not None and sample.edge_ids is not None
    return graph.types.edge_type[sample.edge_ids]


def without_targets(graph: Graph, sample: Sample, ends: Tensor, target_type: TargetType | None = None) -> Sample:
    """The sample without the edges between these pairs of seeds, in either direction. ``ends`` are positions in it.

    Of a graph with types, edges of other types between them stay.
    """
    num_seeds, num_edges = sample.num_sampled_nodes[0], sample.num_sampled_edges[0]
    rows = torch.arange(num_seeds, device=ends.device)
    rows = rows.repeat_interleave(sample.indptr[: num_seeds + 1].diff(), output_size=num_edges)
    columns = sample.indices[:num_edges].to(torch.int64)
    number = torch.cat([ends[0] * num_seeds + ends[1], ends[1] * num_seeds + ends[0]])
    dropped = torch.zeros_like(sample.indices, dtype=torch.bool)
    dropped[:num_edges] = (columns < num_seeds) & torch.isin(rows * num_seeds + columns, number)
    if target_type is not None:
        dropped &= target_type.shows(graph, sample)
    return without(sample, dropped)


def without(sample: Sample, dropped: Tensor) -> Sample:
    """The sample without the edges that the mask ``dropped`` marks; all nodes stay."""
    kept = ~dropped
    upto = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # edges kept before each edge
    hops = upto[torch.tensor([0, *accumulate(sample.num_sampled_edges)], device=upto.device)].diff()
    left = kept.nonzero().view(-1)
    return sample._replace(
        indptr=upto[sample.indptr.to(torch.int64)].to(sample.indptr.dtype),
        indices=sample.indices[left],
        num_sampled_edges=hops.tolist(),
        edge_ids=None if sample.edge_ids is None else sample.edge_ids[left],
        edge_weight=None if sample.edge_weight is None else sample.edge_weight[left],
        edge_kinds=None if sample.edge_kinds is None else sample.edge_kinds[left],
        is_constant=False,
    )


def labelled(
    sample: Sample,
    ends: Tensor,
    num_edges: int,
    target_type: TargetType | None = None,
    carried: Mapping[str, Tensor] | None = None,
) -> Sample:
    """The sample with what :func:`labels` says of its targets."""
    number = None if target_type is None else target_type.number
    return sample._replace(extra=labels(ends, num_edges, carried), is_constant=False, target_type=number)


def labels(ends: Tensor, num_edges: int, carried: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The arrays ``edge_label_index`` and ``edge_label`` of a batch whose first ``num_edges`` targets are edges.

    Where these edges carry labels, theirs, and what else they carry.
    """
    if carried is not None:
        return {"edge_label_index": ends} | {name: rows.to(ends.device) for name, rows in carried.items()}
    label = torch.zeros(ends.shape[1], device=ends.device)
    label[:num_edges] = 1.0
    return {"edge_label_index": ends, "edge_label": label}


def rows_at(arrays: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of each array."""
    return {name: array[rows] for name, array in arrays.items()}
