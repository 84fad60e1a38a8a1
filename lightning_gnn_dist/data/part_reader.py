"""Reads the part of a rank: its chunks of the graph and the nodes around them, in RAM with local ids."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.residency import Holding
from lightning_gnn_dist.data.typed.part import learned_from, read_typed
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.rows import (
    Lookup,
    bytes_per_row,
    count_edges,
    degrees_of,
    induced_rows,
    senders_by_row,
    take_edges,
    take_rows,
)
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.partition.base import Partition


@dataclass(frozen=True, eq=False)
class PartRows:
    """The in-neighbours of some nodes, as the whole graph has them.

    Attributes:
        indptr: Where each node's row starts in ``senders``, and where the last one ends.
        senders: The in-neighbours, row after row, by their ids in the whole graph.
        edge_arrays: The graph's edge arrays, one row for each entry of ``senders``.
    """

    indptr: Tensor
    senders: Tensor
    edge_arrays: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank trains on in a super-epoch.

    Attributes:
        graph: Its nodes and the edges among them: the rank's own nodes first, then others that send messages. Of a
            typed graph, the nodes are in the order of their ids.
        rows: The whole rows that were read, for the next switch. None if the part never changes.
        bytes_read: Bytes that were read from the whole graph.
        seconds: How long reading and building the part took.
        num_residents: How many nodes come before those that the boundary added.
    """

    graph: Graph
    rows: PartRows | None
    bytes_read: int
    seconds: float
    num_residents: int


@dataclass(frozen=True, eq=False)
class PartReader:
    """Reads what one rank holds in any super-epoch. It depends on the arguments alone, so ranks need not communicate.

    Args:
        graph: The whole graph, usually a memory map.
        partition: The chunk of each node.
        holding: Which chunks the rank holds, and which random nodes of others.
        rank: Whose part it is.
        world_size: How many ranks there are.
        seed: Decides everything random.
        boundary: Which nodes around the part come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
    """

    graph: Graph
    partition: Partition
    holding: Holding
    rank: int
    world_size: int
    seed: int
    boundary: Boundary
    coverage: Coverage | None

    def read(self, super_epoch: int, previous: Part | None = None) -> Part:
        """Return the part of a super-epoch. What ``previous`` holds already is copied from there."""
        started = time.perf_counter()
        # A memory map for this call alone, so that the pages it reads are freed after the copy.
        graph = Graph.open(self.graph.path) if self.graph.path else self.graph
        residents, num_own = self.residents(super_epoch)
        if have_names(graph.types):
            ways = learned_from(self.graph), self.boundary, self.coverage, self.seed
            typed = read_typed(graph, residents, residents[:num_own], *ways)
            return Part(typed, None, typed.num_bytes, time.perf_counter() - started, residents.numel())
        reading = _GraphRows(graph, previous)
        hops = self.boundary.around(graph, residents, reading.edges_into, self.seed)
        if not hops and self.holding.residency.sweep(self.world_size) == 1:
            part, rows, num_bytes = _read_once(graph, residents)
        else:
            part, rows, num_bytes = _read_new(graph, [residents, *hops], reading, previous)
        nodes = part.node_arrays["n_id"]
        part.node_arrays["train_mask"][num_own:] = False  # a copy: the graph's own mask stays
        if self.coverage is not None:
            part.node_arrays["coverage"] = self.coverage.of(part, degrees_of(graph.indptr, nodes), num_own)
        return Part(part, rows, num_bytes, time.perf_counter() - started, residents.numel())

    def residents(self, super_epoch: int) -> tuple[Tensor, int]:
        """Return the nodes of the part without its halo, the rank's own first, and how many are its own."""
        held = self.holding.residency.held(super_epoch, self.rank, self.world_size, self.seed)
        own, others = nodes_of(self.partition, held.own), nodes_of(self.partition, held.others)
        residents = torch.cat([own, others])
        if self.holding.extra_nodes:
            residents = torch.cat([residents, self.holding.extra(residents, self.partition, self.rank, self.seed)])
        return residents, own.numel()


def nodes_of(partition: Partition, chunks: Iterable[int]) -> Tensor:
    """Return the nodes of several chunks: int64, in increasing order."""
    chosen = torch.zeros(partition.num_parts, dtype=torch.bool)
    chosen[list(chunks)] = True
    return chosen[partition.assignment].nonzero().view(-1)


def _read_once(graph: Graph, nodes: Tensor) -> tuple[Graph, None, int]:
    """Return the part of ``nodes`` when it never changes, and the bytes read: whole rows are not kept."""
    part = graph.induced(nodes)
    part.node_arrays |= {"n_id": nodes, "train_mask": _train_mask(graph, nodes)}
    num_edges = count_edges(graph.indptr, nodes)
    num_bytes = nodes.numel() * bytes_per_row(graph.node_arrays) + num_edges * _bytes_per_edge(graph)
    return part, None, num_bytes


def _read_new(
    graph: Graph, hops: list[Tensor], reading: _GraphRows, previous: Part | None
) -> tuple[Graph, PartRows, int]:
    """Return the part of the nodes of some hops, the whole rows of all but the last hop, and the bytes read."""
    nodes = torch.cat(hops)
    rows = joined([reading.rows_of(hop) for hop in hops[: max(1, len(hops) - 1)]])
    arrays, new_bytes = _read_arrays(graph, nodes, previous)
    return induced(rows, nodes, arrays), rows, new_bytes + reading.new_edges * _bytes_per_edge(graph)


class RowReading(ABC):
    """Reads whole rows, and remembers them: a boundary asks for them first."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, PartRows]] = []

    @abstractmethod
    def read(self, nodes: Tensor) -> PartRows:
        """Return the whole rows of some nodes."""

    def rows_of(self, nodes: Tensor) -> PartRows:
        for known, rows in self._known:
            if known is nodes:
                return rows
        self._known.append((nodes, self.read(nodes)))
        return self._known[-1][1]

    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each edge into some nodes, the number of the node among them, and the sender, piece by piece."""
        rows = self.rows_of(nodes)
        return senders_by_row(rows.indptr, rows.senders)


class _GraphRows(RowReading):
    """Reads rows of the whole graph.

    Args:
        graph: The whole graph.
        previous: The part before, of which rows are copied.
    """

    def __init__(self, graph: Graph, previous: Part | None) -> None:
        super().__init__()
        self._graph, self._previous = graph, previous
        self.new_edges = 0  # edges that were read from the whole graph

    def read(self, nodes: Tensor) -> PartRows:
        rows, new_edges = _read_rows(self._graph, nodes, self._previous)
        self.new_edges += new_edges
        return rows


def joined(pieces: list[PartRows]) -> PartRows:
    """Return the rows of several pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    degrees = torch.cat([piece.indptr.diff() for piece in pieces])
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    names = pieces[0].edge_arrays
    edges = {name: torch.cat([piece.edge_arrays[name] for piece in pieces]) for name in names}
    return PartRows(indptr, torch.cat([piece.senders for piece in pieces]), edges)


def _read_rows(graph: Graph, nodes: Tensor, previous: Part | None) -> tuple[PartRows, int]:
    """Return the whole rows of ``nodes``, and how many of their edges had to be read."""
    degrees = graph.indptr[nodes + 1] - graph.indptr[nodes]
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    had, kept = nodes[:0], PartRows(graph.indptr[:1], graph.indices[:0], {})
    if previous is not None and previous.rows is not None:
        kept = previous.rows
        had = previous.graph.node_arrays["n_id"][: kept.indptr.numel() - 1]
    at, known = Lookup(had)(nodes)
    arrays = {"": graph.indices, **graph.edge_arrays}
    out = {name: array.new_empty((int(indptr[-1]), *array.shape[1:])) for name, array in arrays.items()}
    new, old = (~known).nonzero().view(-1), known.nonzero().view(-1)
    take_edges(graph.indptr, arrays, nodes[new], indptr, out, new)
    take_edges(kept.indptr, {"": kept.senders, **kept.edge_arrays}, at, indptr, out, old)
    return PartRows(indptr, out.pop(""), out), int(degrees[new].sum())


def _read_arrays(graph: Graph, nodes: Tensor, previous: Part | None) -> tuple[dict[str, Tensor], int]:
    """Return the node arrays of ``nodes``, and how many bytes of them had to be read."""
    had = previous.graph.node_arrays if previous else {"n_id": nodes[:0]}
    at, known = Lookup(had["n_id"])(nodes)
    new, old = (~known).nonzero().view(-1), known.nonzero().view(-1)

    def merged(array: Tensor, copy: Tensor | None) -> Tensor:
        if copy is None or not old.numel():
            return take_rows(array, nodes[new])
        out = array.new_empty((nodes.numel(), *array.shape[1:]))
        out[new], out[old] = take_rows(array, nodes[new]), copy[at]
        return out

    arrays = {name: merged(array, had.get(name)) for name, array in graph.node_arrays.items()}
    # Not from the copy, whose mask leaves out training nodes that were not the rank's own.
    arrays |= {"n_id": nodes, "train_mask": _train_mask(graph, nodes)}
    return arrays, new.numel() * bytes_per_row(graph.node_arrays)


def _train_mask(graph: Graph, nodes: Tensor) -> Tensor:
    """Return the training mask of ``nodes``, all True without one: link prediction marks own nodes by it."""
    mask = graph.node_arrays.get("train_mask")
    return torch.ones(nodes.numel(), dtype=torch.bool) if mask is None else take_rows(mask, nodes)


def induced(rows: PartRows, nodes: Tensor, arrays: dict[str, Tensor]) -> Graph:
    """Return the graph among ``nodes``, with local ids. Nodes without a row are leaves, which receive nothing."""
    receivers = torch.arange(rows.indptr.numel() - 1)
    indptr, senders, edges = induced_rows(
        rows.indptr, rows.senders, rows.edge_arrays, receivers, Lookup(nodes), index_dtype(nodes.numel())
    )
    leaves = nodes.numel() - receivers.numel()
    return checked_graph(torch.cat([indptr, indptr[-1:].expand(leaves)]), senders, arrays, edges)


def _bytes_per_edge(graph: Graph) -> int:
    return graph.indices.element_size() + bytes_per_row(graph.edge_arrays)
