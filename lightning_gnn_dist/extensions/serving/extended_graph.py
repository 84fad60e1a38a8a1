"""A graph with the new nodes of some requests, none of which sees those of another.

    ids:     0 ... N - 1    the graph's own nodes
             N + j          new node j of a request, for each request anew
    rows:    (request, node) -> a row that requests bring   if the node is new, or new edges lead to it
             node            -> a row of the graph          otherwise

Both kinds of rows have an owner, as rows in shards have, and are drawn from in the same way. Every node that is asked
for has a tree of its own, so that what it draws depends on nobody else. In a batch the new nodes of a type are numbered
behind those of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.pool import BufferPool, Widen
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.sample import BatchKey, Sample, graph_is_damaged
from lightning_gnn_dist.extensions.asking.turns import answered, at_once
from lightning_gnn_dist.extensions.larger_than_memory.ahead import RowCache, Table, Tables
from lightning_gnn_dist.extensions.serving.question import Arrays, Question, served
from lightning_gnn_dist.extensions.shards.index import OwnedTypes
from lightning_gnn_dist.extensions.shards.questions import (
    DrawRule,
    Join,
    Message,
    Owner,
    Route,
    draw_hops,
    sample_at_times,
)
from lightning_gnn_dist.extensions.shards.questions import Question as AskedOfOwners
from lightning_gnn_dist.extensions.temporal.row_draws import GrowingBatch
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.extensions.temporal.times import (
    TimeOrder,
    TimeSource,
    node_times,
    ordered,
    sources_of,
    time_order,
)
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, edge_positions, starts_of, take_rows
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, edge_type_dtype, offsets_of
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

ServedSampler = NeighborSampler | TemporalSampler
KEY = BatchKey(0, 0, 0)  # all answers draw by it, so that they are the same every time
_POOL = BufferPool(0)


@dataclass(frozen=True, eq=False)
class _Types(OwnedTypes):
    """The types of the graph with the new nodes.

    Attributes:
        node_types: The names of the node types.
        edge_types: Those of the edge types.
        offsets: The first number of each node type in a batch, and at the end how many there are.
        edges: For each edge type none, the edges of the graph, and these and those of the requests' rows.
        ids: The id of the node of each of the requests' rows.
        seeds: The node type that is asked for.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    offsets: tuple[int, ...]
    edges: Tensor
    ids: Tensor
    seeds: str

    def to_whole(self, owner: int, rows: Tensor) -> Tensor:
        return self.ids[rows] if owner else rows

    def seed_type(self) -> str:
        return self.seeds


class ExtendedGraph(Tables[_Types]):
    """A graph with what some requests bring.

    Args:
        graph: The graph.
        seed_type: The type of the nodes that are asked for.
        asked: The requests.
        most_new: How many new nodes a request may have.
    """

    def __init__(self, graph: Graph, seed_type: str, asked: Sequence[Question], most_new: int) -> None:
        self._graph, self._asked, types = graph, asked, graph.types
        self.num_nodes = graph.num_nodes + most_new
        self._bits = self.num_nodes.bit_length()
        self._new = NewNodes(graph, asked, self._bits)
        self._bring_rows()
        num_asked = torch.tensor([len(of.nodes) for of in asked])
        self._request_of_tree = torch.arange(len(asked)).repeat_interleave(num_asked)
        counts = [len(types.nodes_of(kind)) + n for kind, n in zip(types.node_types, self._new.of_types, strict=True)]
        edges = torch.tensor([[0, *types.num_edges], [0, *self._rows.types.num_edges]]).cumsum(0)
        edges = torch.stack([torch.zeros_like(edges[0]), *edges], 1)[1:]
        names = types.node_types, types.edge_types
        of_batch = _Types(*names, offsets_of(counts), edges, self._ids, seed_type)
        super().__init__(of_batch, self._of_nodes(), self._of_edges())
        self._orders: list[dict[str, TimeOrder]] = [{}, {}]
        pairs = zip((graph, self._rows), self._orders, strict=True)
        self._owners = [Owner(rows, self.types, at, _POOL, orders) for at, (rows, orders) in enumerate(pairs)]

    def _bring_rows(self) -> None:
        """Make the rows that requests bring, those of a type behind each other; senders are called by their ids."""
        graph, asked, types, bits = self._graph, self._asked, self._graph.types, self._bits
        new = [of_type for of in asked for of_type in of.edges]
        lengths = torch.tensor([of_type.ends.shape[1] for of_type in new])
        requests = torch.arange(len(asked)).repeat_interleave(len(types.edge_types)).repeat_interleave(lengths)
        senders, receivers = torch.cat([of_type.ends for of_type in new], 1)
        receivers = (requests << bits) | receivers
        names = torch.cat([self._new.names, receivers]).unique()
        kinds, (at, is_new) = types.type_of(names & ((1 << bits) - 1)), self._new.find(names)
        kinds[is_new] = self._new.kinds[at]
        names = names[kinds.argsort(stable=True)]
        self._ids, self._requests, self._row_of = names & ((1 << bits) - 1), names >> bits, Lookup(names)

        old = (self._ids < graph.num_nodes).nonzero().view(-1)
        positions = edge_positions(graph.indptr, self._ids[old])
        degrees = graph.indptr[self._ids[old] + 1] - graph.indptr[self._ids[old]]
        rows = torch.cat([old.repeat_interleave(degrees), self._row_of(receivers)[0]])
        kinds_of_new = torch.arange(len(types.edge_types)).repeat(len(asked)).repeat_interleave(lengths)
        of_edges = torch.cat([types.edge_type[positions].long(), kinds_of_new])
        order = (rows * len(types.edge_types) + of_edges).argsort(stable=True)
        of_types = GraphTypes(
            types.node_types,
            offsets_of(torch.bincount(kinds, minlength=len(types.node_types)).tolist()),
            types.edge_types,
            tuple(torch.bincount(of_edges, minlength=len(types.edge_types)).tolist()),
            of_edges[order].to(edge_type_dtype(len(types.edge_types))),
            {kind: {} for kind in types.node_types},
            self._arrays(positions, of_edges, order),
        )
        indptr = starts_of(torch.bincount(rows, minlength=len(names)))
        senders = torch.cat([graph.indices[positions], senders])
        self._rows = typed_graph(indptr, senders[order].to(graph.indices.dtype), of_types)

    def _arrays(self, positions: Tensor, kinds: Tensor, order: Tensor) -> dict[EdgeType, Arrays]:
        """Return what edges carry: those at some positions in the graph, and then the new ones, in an order."""
        graph, found = self._graph, dict[EdgeType, Arrays]()
        for number, kind in enumerate(graph.types.edge_types):
            is_of_type = kinds == number
            places = places_of(graph, number, positions[is_of_type[: len(positions)]])
            old = {name: take_rows(array, places) for name, array in graph.types.edge_arrays[kind].items()}
            below = joined([old, *[of.edges[number].arrays for of in self._asked]])
            at = (is_of_type.cumsum(0) - 1)[order[is_of_type[order]]]
            found[kind] = {name: array[at] for name, array in below.items()}
        return found

    # What draws ask.

    def to_owners(self, nodes: Tensor, groups: Tensor) -> tuple[Route, list[Message]]:
        at, is_brought = self._row_of(self._names(nodes, groups))
        if bool((nodes[~is_brought] >= self._graph.num_nodes).any()):
            raise graph_is_damaged(self._graph)
        rows = nodes.clone()
        rows[is_brought] = at
        route = Route(is_brought.long(), len(self._owners))
        return route, [list(of_owner) for of_owner in zip(route.pieces(rows), route.pieces(groups), strict=True)]

    def in_order(self, route: Route, answers: list[Message]) -> tuple[Tensor, Tensor, Join]:
        return route.in_order(answers)

    def ask(self, questions: list[AskedOfOwners]) -> list[list[Message]]:
        """Return for each question the answer of each owner."""
        owners = self._owners
        return [
            [owner.answer(kind, of) for owner, of in zip(owners, pieces, strict=True)] for kind, pieces in questions
        ]

    def _names(self, nodes: Tensor, trees: Tensor) -> Tensor:
        return (self._request_of_tree[trees] << self._bits) | nodes

    # Batches.

    def batch(self, sampler: ServedSampler, widen: Widen = True) -> SampledData:
        """Return the batch of all nodes that are asked for."""
        sample = self._sample(sampler)
        (batch,) = answered(self.fill(self.seek([sample]), widen=widen), self.ask)
        for number, (kind, store) in enumerate(zip(self.types.node_types, batch.node_stores, strict=True)):
            self._number_new(number, kind, store._mapping["n_id"])
        return batch

    def _sample(self, sampler: ServedSampler) -> Sample:
        seeds = torch.cat([of.nodes for of in self._asked])
        if isinstance(sampler, TemporalSampler):
            self._order_by(sampler.time)
            name, trees = sampler.sight[1], torch.arange(len(seeds))
            node_times(self._graph, name, self.types.seeds)  # refuses what is none
            times = self._numbers(name, self.types.seeds, seeds, self._names(seeds, trees))
            steps = sample_at_times(self, sampler, [seeds], [times], [KEY])
        else:
            batch = GrowingBatch(seeds, self.num_nodes, bits=self._bits)
            rule, fanouts = DrawRule(sampler.replace, sampler.weight), sampler.of_types(self.types)
            steps = draw_hops(self, [batch], fanouts, [KEY] * len(seeds), rule)
        (drawn,) = answered(steps, self.ask)
        nodes = self._in_batch(drawn.nodes, drawn.extra["batch"])
        return drawn._replace(nodes=nodes, extra=drawn.extra if isinstance(sampler, TemporalSampler) else {})

    def _in_batch(self, ids: Tensor, trees: Tensor) -> Tensor:
        """Return the numbers in a batch of nodes that trees have reached."""
        types, offsets = self._graph.types, torch.tensor(self.types.offsets)
        at, is_new = self._new.find(self._names(ids, trees))
        if bool((ids[~is_new] >= self._graph.num_nodes).any()):
            raise graph_is_damaged(self._graph)
        shifts = offsets - torch.tensor(types.offsets)
        found = ids + shifts[types.type_of(ids)]
        found[is_new] = (offsets[1:] - torch.tensor(self._new.of_types))[self._new.kinds[at]] + self._new.places[at]
        return found

    def _number_new(self, number: int, kind: str, ids: Tensor) -> None:
        """Let new nodes of each request be called as if no other had any: behind the nodes of the graph."""
        first = len(self._graph.types.nodes_of(kind))
        is_new = ids >= first
        ids[is_new] = first + self._new.numbers(number)[ids[is_new] - first]

    # Rows.

    def _of_nodes(self) -> list[Table]:
        graph = self._graph.types
        return [
            _table(served(graph.node_arrays[kind]), len(graph.nodes_of(kind)), new)
            for kind, new in zip(graph.node_types, self._new.arrays, strict=True)
        ]

    def _of_edges(self) -> dict[int, Table]:
        graph, rows = self._graph.types, self._rows.types
        return {
            number: _table(dict(graph.edge_arrays[kind]), graph.num_edges[number], rows.edge_arrays[kind])
            for number, kind in enumerate(graph.edge_types)
            if graph.edge_arrays[kind]
        }

    # Times.

    def _order_by(self, name: str) -> None:
        """Order edges by the times of a name."""
        rows, types, sources = self._rows, self._graph.types, list[TimeSource | None]()
        for kind, source in zip(types.edge_types, sources_of(self._graph, name), strict=True):
            if source is not None and source.first_sender is None:
                source = TimeSource(rows.types.edge_arrays[kind][name], None)
            elif source is not None:
                at = rows.types.edges_of(kind)
                row = torch.searchsorted(rows.indptr, at, right=True) - 1
                senders = rows.indices[at].long()
                names = (self._requests[row] << self._bits) | senders
                source = TimeSource(self._numbers(name, kind[0], senders, names), None)
            sources.append(source)
        of_graph, of_rows = self._orders
        of_graph[name], of_rows[name] = time_order(self._graph, name), ordered(rows, sources)

    def _numbers(self, name: str, kind: str, ids: Tensor, names: Tensor) -> Tensor:
        """Return what an array of a node type holds for some nodes."""
        types = self._graph.types
        own, brought = types.node_arrays[kind][name], self._new.arrays[types.node_types.index(kind)][name]
        at, is_new = self._new.find(names)
        found = own.new_empty(len(ids))
        found[~is_new] = own[ids[~is_new] - types.nodes_of(kind).start]
        found[is_new] = brought[self._new.places[at]]
        return found


def _table(own: dict[str, Tensor], count: int, brought: Arrays) -> Table:
    """Return the rows of a type: so many of the graph, and behind them what requests bring."""
    return Table(
        own, 0, count, RowCache(own, 0), lambda ids: at_once({name: a[ids - count] for name, a in brought.items()})
    )


class NewNodes:
    """The new nodes of some requests.

    Args:
        graph: The graph that the requests are about.
        asked: The requests.
        bits: How many bits of a name are the id.

    Attributes:
        counts: How many each request has of each type, shape (requests, types).
        of_types: How many there are of each type.
        names: Their names, increasing.
        find: Returns which of them have some names, and of each name whether one has it.
        kinds: The type of each.
        places: Where each stands among all of its type.
        arrays: For each type what they carry, in the order of places.
    """

    def __init__(self, graph: Graph, asked: Sequence[Question], bits: int) -> None:
        self.counts = counts = torch.tensor([of.num_new for of in asked])
        self.of_types, num_types = counts.sum(0).tolist(), counts.shape[1]
        block = torch.arange(counts.numel()).repeat_interleave(counts.view(-1))  # of one request and type
        in_block = torch.arange(len(block)) - starts_of(counts.view(-1))[block]
        requests, self.kinds = block // num_types, block % num_types
        ids = graph.num_nodes + torch.arange(len(block)) - starts_of(counts.sum(1))[requests]
        self.names = (requests << bits) | ids
        self.places = (counts.cumsum(0) - counts).view(-1)[block] + in_block
        self.arrays = [joined([of.new[kind] for of in asked]) for kind in range(num_types)]
        self.find = Lookup(self.names)

    def numbers(self, kind: int) -> Tensor:
        """Return the number of each new node of a type among those of its request."""
        of_type = self.counts[:, kind]
        return torch.arange(int(of_type.sum())) - starts_of(of_type)[:-1].repeat_interleave(of_type)


def joined(pieces: Sequence[Arrays]) -> dict[str, Tensor]:
    """Arrays below each other."""
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
