"""Sums over neighbours of another rank, sent in the place of their rows (SuperGCN, arXiv:2411.16025).

    r(v) = sum over u of w(u, v) s(u) h(u) / (s(v) sum over u of w(u, v))        u: neighbours of v on one other rank

Between two ranks, cut edges are a bipartite graph of nodes that send and nodes that receive. Of a smallest set that
covers these edges, a sender travels as its row h(u), and a receiver gets r(v), which stands for all neighbours on that
rank whose rows do not travel: each of their edges reads it. So sums, means and weighted sums over the edges are what
they were. w is ``edge_weight``, or 1; s is deg^-1/2 where GCN normalises by the degrees of the whole graph, or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import LayerView, Nodes, one_hop
from lightning_gnn_dist.boundary.cover import rows_and_sums
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, starts_of
from lightning_gnn_dist.layers.gcn import degrees_in
from lightning_gnn_dist.layers.through_layers import Layer, layer_rows
from lightning_gnn_dist.sampling.block import Block
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.shipments import Route

_LOOKED_AT = 64  # nodes for which a layer is tried
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}  # what two ways to add up may differ by; narrower types: more
NOT_LINEAR = (
    "boundary=Exchange(sums=True) is for layers that add up their neighbours' rows, all alike or by batch.edge_weight, "
    "such as SAGEConv, GraphConv, GINConv, and GCN of torch_geometric.nn. Layer {index} of layers() returns other rows "
    "where neighbours have their mean in the place of their rows: it is attention, a maximum, or dropout before the "
    "sum. Leave sums out."
)


class Factors(NamedTuple):
    """By what a sender's row is multiplied before it is added up.

    Attributes:
        of_edges: A weight for each edge, or None for 1.
        of_nodes: A factor for each node, or None for 1.
    """

    of_edges: Tensor | None
    of_nodes: Tensor | None

    @classmethod
    def of(cls, edges: Mapping[str, Any], nodes: Mapping[str, Any]) -> Factors:
        """Return those that arrays of edges and of nodes tell: weights, and the degrees that GCN normalises by."""
        degrees, weight = degrees_in(nodes) or (None, "edge_weight")
        weights = None if weight is None else edges.get(weight)
        return cls(
            None if weights is None else weights.reshape(-1).double().cpu(),
            None if degrees is None else nodes[degrees].double().cpu().pow(-0.5),
        )

    def are_positive(self, edges: Tensor) -> Tensor:
        """Whether a sum may stand for an edge: weights that cancel each other are no divisor."""
        return torch.ones(len(edges), dtype=torch.bool) if self.of_edges is None else self.of_edges[edges] > 0

    def shares(self, senders: Tensor, receivers: Tensor, edges: Tensor) -> Tensor:
        """Return by what each sender's row is multiplied in the receiver's sum.

        Args:
            senders: The sender of each edge.
            receivers: Its receiver.
            edges: Its place among the weights, which are positive.
        """
        weights = torch.ones(len(edges), dtype=torch.float64) if self.of_edges is None else self.of_edges[edges]
        total = weights.new_zeros(int(receivers.max()) + 1 if len(receivers) else 0).index_add_(0, receivers, weights)
        if self.of_nodes is not None:
            weights = weights * self.of_nodes[senders] / self.of_nodes[receivers]
        return weights / total[receivers]


@dataclass(frozen=True, eq=False)
class Sums:
    """What a rank sends and reads before a layer.

    Attributes:
        rows: The own nodes whose rows it sends, for each rank one after the other.
        sums: The sums that it sends, over own nodes.
        at: Where the nodes stand in the batch whose arrays are shown beside what is received: for a sum those of the
            node that gets it.
        indices: The senders of the layer's edges: own nodes, then what is received.
    """

    rows: Tensor
    sums: Block
    at: Tensor
    indices: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Sums:
        assert self.sums.weight is not None
        block = replace(self.sums.to(device), weight=self.sums.weight.to(device, dtype), dtype=dtype)
        return Sums(self.rows.to(device), block, self.at.to(device), self.indices.to(device))

    def gathered(self, rows: Tensor, gather: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return own rows with what other ranks send below them, and the thread that ``gather`` returns. Collective.

        Args:
            rows: The own rows.
            gather: Returns rows to send with those received below them, and the thread.
        """
        sums = (self.sums.weighted_adj @ rows.flatten(1)).view(self.sums.num_dst, *rows.shape[1:])
        sent = torch.cat([rows[self.rows], sums])
        both, thread = gather(sent)
        return torch.cat([rows, both[len(sent) :]]), thread

    def view(self, outermost: Block, num_dst: int, num_own: int) -> LayerView:
        """Return what the layer sees of a batch whose first layer computes on this block."""
        own = torch.arange(num_own, device=self.at.device)
        block = outermost.head(num_dst, num_own + len(self.at), len(self.indices))
        nodes = Nodes(num_dst, block.num_src, torch.cat([own, self.at]))
        return LayerView([nodes], [replace(block, indices=self.indices)])


class Planning:
    """Finds out which rows and which sums ranks send each other, layer by layer.

    Args:
        part: The rank's nodes, and all others that send to them.
        sample: Its nodes and edges as the batch has them: own nodes, then others.
        num_own: How many nodes are own.
        ids: The ids in the whole graph of the nodes of the batch.
        ranks: Who owns them.
        channel: The ranks.
    """

    def __init__(self, part: Graph, sample: Sample, num_own: int, ids: Tensor, ranks: Tensor, channel: Channel) -> None:
        self._sample, self._num_own, self._ids, self._ranks, self._channel = sample, num_own, ids, ranks, channel
        self._find = Lookup(ids[:num_own])
        of_edges, of_nodes = Factors.of(part.edge_arrays, part.node_arrays)
        self._factors = Factors(
            None if of_edges is None else of_edges[sample.edge_ids],
            None if of_nodes is None else of_nodes[sample.nodes],
        )

    def of_layer(self, num_dst: int, num_own: int) -> tuple[Sums, Route]:
        """Return what is sent and read before a layer, and the way of it. Collective.

        Args:
            num_dst: The nodes that the layer computes.
            num_own: The own nodes whose rows it reads.
        """
        starts = self._sample.indptr[: num_dst + 1].long()
        indices = self._sample.indices[: int(starts[-1])].long()
        receivers = torch.arange(num_dst).repeat_interleave(starts.diff())
        cut = (indices >= self._num_own).nonzero().view(-1)
        owner, first = self._ranks[indices[cut]], num_own
        at, to_receive, asked = [indices[:0]], list[Tensor](), list[tuple[Tensor, ...]]()
        for rank in range(self._channel.size):
            edges = cut[owner == rank]
            rows, is_sum = rows_and_sums(indices[edges], receivers[edges], self._factors.are_positive(edges))
            of_rows, of_sums = edges[~is_sum], edges[is_sum]
            senders, getters = indices[of_sums], receivers[of_sums]
            sums, number, counts = getters.unique(return_inverse=True, return_counts=True)
            shares = self._factors.shares(senders, getters, of_sums)
            asked.append((self._ids[rows], counts, self._ids[senders], shares))
            indices[of_rows] = first + torch.searchsorted(rows, indices[of_rows])
            indices[of_sums] = first + len(rows) + number
            at += [rows, sums]
            to_receive.append(torch.arange(len(rows) + len(sums)) + first - num_own)
            first += len(rows) + len(sums)
        told = [self._channel.exchange(of_ranks) for of_ranks in zip(*asked, strict=True)]
        rows, sums, to_send = self._to_send(num_own, *told)
        found = Sums(rows, sums, torch.cat(at), indices.to(self._sample.indices.dtype))
        return found, Route(to_send, to_receive)

    def _to_send(
        self, num_own: int, rows: list[Tensor], counts: list[Tensor], senders: list[Tensor], shares: list[Tensor]
    ) -> tuple[Tensor, Block, list[Tensor]]:
        """Return the rows and sums that other ranks have asked for, and which of them each rank gets."""
        places, columns = (self._find(torch.cat(ids))[0] for ids in (rows, senders))
        starts = starts_of(torch.cat(counts)).to(torch.int64)
        sums = Block(len(starts) - 1, num_own, starts, columns, torch.cat(shares), torch.float64)
        of_rows, of_sums = (torch.arange(sum(map(len, each))).split([*map(len, each)]) for each in (rows, counts))
        return places, sums, [torch.cat([a, b + len(places)]) for a, b in zip(of_rows, of_sums, strict=True)]


def adds_up(layer: Layer, view: Any, index: int) -> bool:
    """Whether a layer returns the same rows where neighbours have their mean in the place of their rows.

    It is tried for some nodes of its batch, with rows drawn at random, and the same random numbers both times.
    """
    block, arrays, x = view.blocks[0], view._store._mapping, view.x
    count = min(block.num_dst, _LOOKED_AT)
    head = block.head(count, block.num_src, int(block.indptr[count]))
    factors, (senders, receivers) = Factors.of(arrays, arrays), head.edge_index.cpu()
    some = factors.are_positive(torch.arange(len(senders))).nonzero().view(-1)
    shares = torch.zeros(len(senders), dtype=torch.float64)
    shares[some] = factors.shares(senders[some], receivers[some], some)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(index)).to(x)
    mean = replace(head, weight=shares.to(x), dtype=x.dtype).weighted_adj @ x.flatten(1)
    x_of_means = torch.cat([x, mean.view(count, *x.shape[1:])])
    at = torch.cat([torch.arange(block.num_src), torch.arange(count)]).to(x.device)
    indices = senders.index_copy(0, some, block.num_src + receivers[some]).to(head.indices)
    of_means = replace(head, num_src=len(at), indices=indices)
    views = [
        one_hop(view, LayerView([Nodes(count, block.num_src)], [head]), [x]),
        one_hop(view, LayerView([Nodes(count, len(at), at)], [of_means]), [x_of_means]),
    ]
    return _are_equal(*(_rows_without_trace(layer, each, index) for each in views))


def _rows_without_trace(layer: Layer, view: Any, index: int) -> Tensor:
    """The rows that a layer makes of a batch, with random numbers that are then drawn once more."""
    device = view.x.device
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        (rows,) = layer_rows(layer, view, index)
    assert rows is not None
    return rows


def _are_equal(one: Tensor, other: Tensor) -> bool:
    rounding = 0.05 if torch.is_autocast_enabled(one.device.type) else _ROUNDING.get(one.dtype, 0.05)
    if not one.numel():
        return True
    return bool((one - other).abs().max() <= rounding * one.abs().max())
