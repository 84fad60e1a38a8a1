"""Which rows ranks send each other between the layers, found out once for a partition.

    layer L computes the seeds -> their senders -> layer L - 1 computes those, each on the rank that owns it -> ...

Ranks that do not hold a sender ask its owner for it, so that afterwards all know what to send and what will come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.loader import NoSeedsError
from lightning_gnn_dist.engine.sample import Sample, has_ids
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, edge_positions, starts_of
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.shipments import Route


class Owners(NamedTuple):
    """Which rank owns each node of a part.

    Attributes:
        ids: The nodes of the part by their ids in the whole graph, which all ranks number alike.
        ranks: The rank that owns each of them.
    """

    ids: Tensor
    ranks: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """What a rank does for one layer with the nodes of one type.

    Attributes:
        num_dst: The own nodes whose rows it computes: the first of the batch.
        num_own: The own nodes whose rows it needs: the first of the batch.
        num_remote: The nodes of other ranks whose rows it needs: the first behind all own nodes.
        route: How the rows of the layer before get to the ranks that need them. None for input rows: each rank has
            those that it needs.
    """

    num_dst: int
    num_own: int
    num_remote: int
    route: Route | None


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What a rank computes, sends and receives in every forward.

    Attributes:
        sample: Its nodes and their edges, by positions in the part: seeds, then other own nodes, then nodes of others.
        num_seeds: The nodes whose rows the last layer computes.
        share: The seeds of this rank, as a share of all ranks'.
        num_own: Of each node type, the nodes of the sample that the rank owns.
        steps: For each layer, the first layer first, a step for each node type.
    """

    sample: Sample
    num_seeds: int
    share: float
    num_own: list[int]
    steps: list[list[Step]]


def exchange_plan(part: Graph, seeds: Tensor, owners: Owners, channel: Channel, num_layers: int) -> ExchangePlan:
    """Find out what the ranks compute and send. Collective.

    Args:
        part: The rank's nodes, and all others that send to them. In a graph without types its own come first.
        seeds: The nodes whose rows the last layer computes, positions in the part.
        owners: The rank of every node of the part.
        channel: The ranks.
        num_layers: The number of layers.
    """
    own = torch.tensor([seeds.numel()])
    total = int(torch.cat(channel.exchange([own] * channel.size)).sum())
    if total == 0:
        raise NoSeedsError("train_mask marks no node: there is nothing to learn from.")
    reach, find = _Reach(part, owners.ranks == channel.rank, seeds, num_layers), Lookup(owners.ids)
    needs: list[tuple[list[Tensor], list[Tensor]] | None] = []
    for layer in range(num_layers, 1, -1):
        others = reach.go_on(layer)
        asked = [others[owners.ranks[others] == rank] for rank in range(channel.size)]
        told = [find(some)[0] for some in channel.exchange([owners.ids[some] for some in asked])]
        reach.add(torch.cat(told), layer - 1)
        needs.insert(0, (told, asked))
    reach.go_on(1)
    return _planned(part, reach, [None, *needs], seeds.numel(), seeds.numel() / total)


class _Reach:
    """How deep in the model each node of a part is needed.

    Attributes:
        is_own: Whether the rank owns a node.
        last: The last layer that computes an own node, or that reads another's; 0 for own nodes of which input rows
            are read, -1 for nodes that nobody needs.
    """

    def __init__(self, part: Graph, is_own: Tensor, seeds: Tensor, num_layers: int) -> None:
        self._part, self.is_own = part, is_own
        self.last = torch.full((part.num_nodes,), -1)
        self.add(seeds, num_layers)

    def go_on(self, layer: int) -> Tensor:
        """Note the senders that ``layer`` reads; return those that other ranks own."""
        edges = edge_positions(self._part.indptr, self._computed)
        senders: Tensor = self._part.indices[edges].to(torch.int64).unique()
        is_own = self.is_own[senders]
        others = senders[~is_own]
        self._raise(others, layer)
        self.add(senders[is_own], layer - 1)
        return others

    def add(self, own: Tensor, layer: int) -> None:
        """Note own nodes that ``layer`` must compute, beside those of the layers behind it."""
        self._raise(own, layer)
        self._computed = (self.is_own & (self.last >= layer)).nonzero().view(-1)

    def _raise(self, nodes: Tensor, layer: int) -> None:
        self.last[nodes] = self.last[nodes].clamp(min=layer)

    def deepest_first(self, of: Tensor, least: int) -> Tensor:
        """Those of some nodes that are needed, those that the last layers need first, otherwise in order."""
        order = self.last[of].argsort(descending=True, stable=True)
        return of[order[: int((self.last[of] >= least).sum())]]


def _planned(
    part: Graph,
    reach: _Reach,
    needs: list[tuple[list[Tensor], list[Tensor]] | None],
    num_seeds: int,
    share: float,
) -> ExchangePlan:
    own, others = reach.is_own.nonzero().view(-1), (~reach.is_own).nonzero().view(-1)
    own, others = reach.deepest_first(own, 0), reach.deepest_first(others, 1)
    kinds, num_types = part.types.type_of(torch.arange(part.num_nodes)), len(part.types.node_types)
    place = torch.full((part.num_nodes,), -1)  # among the own nodes of a type, or the others of one
    for nodes in (own, others):
        for kind in range(num_types):
            of_kind = nodes[kinds[nodes] == kind]
            place[of_kind] = torch.arange(len(of_kind))
    steps = []
    for layer, need in enumerate(needs, 1):
        of_types = []
        for kind in range(num_types):
            last_own, last_other = (reach.last[nodes[kinds[nodes] == kind]] for nodes in (own, others))
            computed, read = (int((last_own >= least).sum()) for least in (layer, layer - 1))
            route = None if need is None else Route(*([place[n[kinds[n] == kind]] for n in some] for some in need))
            of_types.append(Step(computed, read, int((last_other >= layer).sum()), route))
        steps.append(of_types)
    num_dst = sum(step.num_dst for step in steps[0])
    num_own = torch.bincount(kinds[own], minlength=num_types).tolist()
    return ExchangePlan(_sample(part, torch.cat([own, others]), num_dst), num_seeds, share, num_own, steps)


def _sample(part: Graph, nodes: Tensor, num_dst: int) -> Sample:
    """The nodes with the edges into the first ``num_dst`` of them."""
    position = torch.full((part.num_nodes,), -1)
    position[nodes] = torch.arange(len(nodes))
    edges = edge_positions(part.indptr, nodes[:num_dst])
    degrees = part.indptr[nodes[:num_dst] + 1] - part.indptr[nodes[:num_dst]]
    small = torch.int32 if max(edges.numel(), len(nodes)) < 2**31 else torch.int64
    return Sample(
        nodes=nodes,
        indptr=starts_of(degrees).to(small),
        indices=position[part.indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=[num_dst, len(nodes) - num_dst],
        num_sampled_edges=[edges.numel()],
        edge_ids=edges if has_ids(part) else None,
    )
