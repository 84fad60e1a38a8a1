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
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions, starts_of
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.shipments import Route


class Owners(NamedTuple):
    """Which rank owns each node of a part.

    Attributes:
        ids: The nodes of the part by their ids in the whole graph, which all ranks number alike: the rank's own first,
            then all others that send to them, both in increasing order.
        ranks: The rank that owns each of them.
    """

    ids: Tensor
    ranks: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """What a rank does for one layer.

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
        num_own: The nodes of the sample that the rank owns.
        steps: A step for each layer, the first layer first.
    """

    sample: Sample
    num_seeds: int
    share: float
    num_own: int
    steps: list[Step]


def exchange_plan(part: Graph, seeds: Tensor, owners: Owners, channel: Channel, num_layers: int) -> ExchangePlan:
    """Find out what the ranks compute and send. Collective.

    Args:
        part: The rank's nodes, and behind them all others that send to them.
        seeds: The nodes whose rows the last layer computes, positions in the part.
        owners: The rank of every node of the part.
        channel: The ranks.
        num_layers: The number of layers.
    """
    ids, num_own = owners.ids, int((owners.ranks == channel.rank).sum())
    own = torch.tensor([seeds.numel()])
    total = int(torch.cat(channel.exchange([own] * channel.size)).sum())
    if total == 0:
        raise NoSeedsError("train_mask marks no node: there is nothing to learn from.")
    reach = _Reach(part, num_own, seeds, num_layers)
    needs: list[tuple[list[Tensor], list[Tensor]] | None] = []
    for layer in range(num_layers, 1, -1):
        others = reach.go_on(layer)
        asked = [others[owners.ranks[others] == rank] for rank in range(channel.size)]
        told = [torch.searchsorted(ids[:num_own], some) for some in channel.exchange([ids[some] for some in asked])]
        reach.add(torch.cat(told), layer - 1)
        needs.insert(0, (told, asked))
    reach.go_on(1)
    sample, steps = _sample_and_steps(part, num_own, reach, [None, *needs])
    return ExchangePlan(sample, seeds.numel(), seeds.numel() / total, int((reach.last[:num_own] >= 0).sum()), steps)


class _Reach:
    """How deep in the model each node of a part is needed.

    Attributes:
        last: The last layer that computes an own node, or that reads another's; 0 for own nodes of which input rows
            are read, -1 for nodes that nobody needs.
    """

    def __init__(self, part: Graph, num_own: int, seeds: Tensor, num_layers: int) -> None:
        self._part, self._num_own = part, num_own
        self.last = torch.full((part.num_nodes,), -1)
        self.add(seeds, num_layers)

    def go_on(self, layer: int) -> Tensor:
        """Note the senders that ``layer`` reads; return those that other ranks own."""
        edges = edge_positions(self._part.indptr, self._computed)
        senders: Tensor = self._part.indices[edges].to(torch.int64).unique()
        is_own = senders < self._num_own
        others = senders[~is_own]
        self._raise(others, layer)
        self.add(senders[is_own], layer - 1)
        return others

    def add(self, own: Tensor, layer: int) -> None:
        """Note own nodes that ``layer`` must compute, beside those of the layers behind it."""
        self._raise(own, layer)
        self._computed = (self.last[: self._num_own] >= layer).nonzero().view(-1)

    def _raise(self, nodes: Tensor, layer: int) -> None:
        self.last[nodes] = self.last[nodes].clamp(min=layer)


def _sample_and_steps(
    part: Graph, num_own: int, reach: _Reach, needs: list[tuple[list[Tensor], list[Tensor]] | None]
) -> tuple[Sample, list[Step]]:
    last_own, last_other = reach.last[:num_own], reach.last[num_own:]
    own, others = _deepest_first(last_own, 0), _deepest_first(last_other, 1) + num_own
    nodes = torch.cat([own, others])
    position = torch.full((part.num_nodes,), -1)
    position[nodes] = torch.arange(len(nodes))
    steps = []
    for layer, need in enumerate(needs, 1):
        computed, read = (int((last_own >= least).sum()) for least in (layer, layer - 1))
        route = None if need is None else _route(position, len(own), *need)
        steps.append(Step(computed, read, int((last_other >= layer).sum()), route))
    return _sample(part, nodes, position, steps[0].num_dst), steps


def _deepest_first(last: Tensor, least: int) -> Tensor:
    """The nodes that are needed, those that the last layers need first, otherwise in order."""
    order = last.argsort(descending=True, stable=True)
    return order[: int((last >= least).sum())]


def _route(position: Tensor, first_other: int, told: list[Tensor], asked: list[Tensor]) -> Route:
    return Route([position[nodes] for nodes in told], [position[nodes] - first_other for nodes in asked])


def _sample(part: Graph, nodes: Tensor, position: Tensor, num_dst: int) -> Sample:
    """The nodes with the edges into the first ``num_dst`` of them."""
    edges = edge_positions(part.indptr, nodes[:num_dst])
    degrees = part.indptr[nodes[:num_dst] + 1] - part.indptr[nodes[:num_dst]]
    small = torch.int32 if max(edges.numel(), len(nodes)) < 2**31 else torch.int64
    return Sample(
        nodes=nodes,
        indptr=starts_of(degrees).to(small),
        indices=position[part.indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=[num_dst, len(nodes) - num_dst],
        num_sampled_edges=[edges.numel()],
        edge_ids=edges if part.edge_arrays else None,
    )
