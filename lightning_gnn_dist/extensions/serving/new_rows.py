"""What requests bring: new nodes, and rows of edges, of the new nodes and of nodes of the graph that get new edges.

A node is called by a name, its request and its id, ``request << bits | id``: nobody sees what others bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.extensions.serving.question import Arrays, Question
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, edge_positions, starts_of, take_rows
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes, edge_type_dtype, offsets_of


class NewNodes:
    """The new nodes of some requests.

    Args:
        graph: The graph that the requests are about.
        asked: The requests.
        bits: How many bits of a name are the id.

    Attributes:
        counts: How many each request has of each type, shape (requests, types).
        names: Their names, increasing.
        kinds: The type of each.
        places: Where each stands among all of its type.
        arrays: For each type what they carry, in the order of places.
    """

    def __init__(self, graph: Graph, asked: Sequence[Question], bits: int) -> None:
        self.counts = counts = torch.tensor([of.num_new for of in asked])
        num_types = counts.shape[1]
        block = torch.arange(counts.numel()).repeat_interleave(counts.view(-1))  # of one request and type
        in_block = torch.arange(len(block)) - starts_of(counts.view(-1))[block]
        requests, self.kinds = block // num_types, block % num_types
        ids = graph.num_nodes + torch.arange(len(block)) - starts_of(counts.sum(1))[requests]
        self.names = (requests << bits) | ids
        self.places = (counts.cumsum(0) - counts).view(-1)[block] + in_block
        self.arrays = [joined([of.new[kind] for of in asked]) for kind in range(num_types)]
        self._find = Lookup(self.names)

    def numbers(self, kind: int) -> Tensor:
        """Return the number of each new node of a type among those of its request."""
        of_type = self.counts[:, kind]
        return torch.arange(int(of_type.sum())) - starts_of(of_type)[:-1].repeat_interleave(of_type)

    def find(self, names: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the new nodes have these names, and of each name whether one has it."""
        return self._find(names)


class NewRows:
    """The rows that some requests bring.

    Args:
        graph: The graph that the requests are about.
        asked: The requests.
        new: Their new nodes.
        bits: How many bits of a name are the id.

    Attributes:
        graph: The rows and their edges, with what these carry. Senders are called by their ids.
        ids: The id of the node of each row.
        requests: The request that brings it.
    """

    def __init__(self, graph: Graph, asked: Sequence[Question], new: NewNodes, bits: int) -> None:
        self._of_graph, self._asked, types = graph, asked, graph.types
        receivers = [(r << bits) | of_type.ends[1] for r, of in enumerate(asked) for of_type in of.edges]
        names = torch.cat([new.names, *receivers]).unique()
        ids = names & ((1 << bits) - 1)
        kinds, (at, is_new) = types.type_of(ids), new.find(names)
        kinds[is_new] = new.kinds[at]
        order = kinds.argsort(stable=True)  # the rows of a type follow each other
        self.ids, self.requests, self._find = ids[order], names[order] >> bits, Lookup(names[order])
        counts = torch.bincount(kinds, minlength=len(types.node_types)).tolist()
        self.graph = self._built(counts, self._find(torch.cat(receivers))[0])

    def find(self, names: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of those nodes that have one here, and of each name whether it does."""
        return self._find(names)

    def _built(self, counts: list[int], rows_of_new: Tensor) -> Graph:
        """Return the rows, of so many nodes of each type, given the row of each new edge."""
        graph, types = self._of_graph, self._of_graph.types
        old = (self.ids < graph.num_nodes).nonzero().view(-1)
        positions = edge_positions(graph.indptr, self.ids[old])
        degrees = graph.indptr[self.ids[old] + 1] - graph.indptr[self.ids[old]]
        new = [of_type for of in self._asked for of_type in of.edges]
        kinds_of_new = torch.arange(len(types.edge_types)).repeat(len(self._asked))
        lengths = torch.tensor([of_type.ends.shape[1] for of_type in new])
        rows = torch.cat([old.repeat_interleave(degrees), rows_of_new])
        kinds = torch.cat([types.edge_type[positions].long(), kinds_of_new.repeat_interleave(lengths)])
        senders = torch.cat([graph.indices[positions], *[of_type.ends[0] for of_type in new]])
        order = (rows * len(types.edge_types) + kinds).argsort(stable=True)
        of_types = GraphTypes(
            types.node_types,
            offsets_of(counts),
            types.edge_types,
            tuple(torch.bincount(kinds, minlength=len(types.edge_types)).tolist()),
            kinds[order].to(edge_type_dtype(len(types.edge_types))),
            {kind: {} for kind in types.node_types},
            self._arrays(positions, kinds, order),
        )
        indptr = starts_of(torch.bincount(rows, minlength=sum(counts)))
        return typed_graph(indptr, senders[order].to(graph.indices.dtype), of_types)

    def _arrays(self, positions: Tensor, kinds: Tensor, order: Tensor) -> dict[EdgeType, Arrays]:
        """Return what edges carry: those at some positions in the graph, and then the new ones, in an order."""
        graph, found = self._of_graph, dict[EdgeType, Arrays]()
        for number, kind in enumerate(graph.types.edge_types):
            is_of_type = kinds == number
            places = places_of(graph, number, positions[is_of_type[: len(positions)]])
            old = {name: take_rows(array, places) for name, array in graph.types.edge_arrays[kind].items()}
            below = joined([old, *[of.edges[number].arrays for of in self._asked]])
            at = (is_of_type.cumsum(0) - 1)[order[is_of_type[order]]]
            found[kind] = {name: array[at] for name, array in below.items()}
        return found


def joined(pieces: Sequence[Arrays]) -> dict[str, Tensor]:
    """Arrays below each other."""
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
