"""Builds a part from rows of the whole graph: its residents, and what a boundary brings along.

residents -> nodes of the first hop -> their rows -> nodes of the second hop -> ... -> the graph among all of them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, induced_rows, senders_by_row, starts_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.layers.reach import Neighbourhoods


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


class RowSource(Protocol):
    """Where the rows of a part come from."""

    @property
    def sizes(self) -> Graph:
        """A graph as large as the whole one, for a boundary to count by."""
        ...

    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each edge into some nodes, the number of the node among them, and the sender, piece by piece."""
        ...

    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        """Return the graph among ``nodes``, of which those of some hops alone receive."""
        ...


def around(
    source: RowSource, residents: Tensor, own: Tensor, boundary: Boundary, seed: int
) -> tuple[Graph, Tensor, Tensor]:
    """Return a part in RAM, its nodes, and which of them the rank learns from.

    Args:
        source: Has the rows.
        residents: The nodes of the part without what the boundary brings along.
        own: Those of them that the rank learns from.
        boundary: Which nodes come along: those of the last hop receive nothing.
        seed: Decides everything random.
    """
    found = boundary.around(source.sizes, residents, source.edges_into, seed)
    _check_hops(boundary, found, residents, source.sizes.num_nodes)
    hops = [residents, *found]
    nodes = torch.cat(hops)
    if have_names(source.sizes.types):
        nodes = nodes.sort().values  # so that those of one type follow each other
    return source.among(nodes, hops[: max(1, len(hops) - 1)]), nodes, Lookup(own).contains(nodes)


def _check_hops(boundary: Boundary, hops: object, residents: Tensor, num_nodes: int) -> None:
    """Refuse what is no list of outside nodes, as ``around`` of a boundary returns one."""
    name = f"{type(boundary).__name__}.around()"
    if not isinstance(hops, list | tuple) or not all(map(_is_vector_of_ids, hops)):
        got = f"a list of {', '.join(map(shown, hops))}" if isinstance(hops, list | tuple) else shown(hops)
        raise TypeError(f"{name} must return a list of vectors of int64, the ids of each hop, got {got}.")
    for number, hop in enumerate(hops, 1):
        if hop.numel() and not 0 <= int(hop.min()) <= int(hop.max()) < num_nodes:
            raise ValueError(
                f"{name} must return ids of the {num_nodes:,} nodes of the graph, and those of its hop {number} go "
                f"from {int(hop.min())} to {int(hop.max())}."
            )
    nodes = torch.cat([residents, *hops]).sort().values if hops else residents[:0]
    if (again := nodes[1:][nodes[1:] == nodes[:-1]]).numel():
        raise ValueError(
            f"{name} must return each outside node once, in the first hop that reaches it, and no node of the part, "
            f"got node {int(again[0])} again."
        )


def _is_vector_of_ids(hop: object) -> bool:
    return isinstance(hop, Tensor) and hop.dim() == 1 and hop.dtype == torch.int64


def edges_among(
    rows: PartRows, at: Tensor, nodes: Tensor, receives: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the edges among ``nodes`` as a CSR of local ids, and their arrays.

    Args:
        rows: Whole rows.
        at: Which of them are those of the nodes that receive, in their order.
        nodes: All nodes.
        receives: Which of them receive.
    """
    dtype = index_dtype(nodes.numel())
    starts, senders, edges = induced_rows(rows.indptr, rows.senders, rows.edge_arrays, at, Lookup(nodes), dtype)
    indptr = torch.zeros(nodes.numel() + 1, dtype=torch.int64)
    indptr[1:].masked_scatter_(receives, starts.diff())
    return indptr.cumsum_(0), senders, edges


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
        rows = self.rows_of(nodes)
        return senders_by_row(rows.indptr, rows.senders)

    def rows_of_hops(self, hops: list[Tensor]) -> PartRows:
        """Return the rows of several hops, one after the other."""
        pieces = [self.rows_of(hop) for hop in hops]
        if len(pieces) == 1:
            return pieces[0]
        degrees = torch.cat([piece.indptr.diff() for piece in pieces])
        names = pieces[0].edge_arrays
        edges = {name: torch.cat([piece.edge_arrays[name] for piece in pieces]) for name in names}
        return PartRows(starts_of(degrees), torch.cat([piece.senders for piece in pieces]), edges)


def seeds_around(part: Graph, own: Tensor, train_mask: Tensor, hops: int) -> Tensor:
    """Return the training nodes of other ranks within so many hops of a rank's own nodes, by their ids in its part.

    Args:
        part: What the rank holds.
        own: Its own nodes, by their ids in the part.
        train_mask: Marks all training nodes of the part, those of other ranks as well.
        hops: How far others may be.
    """
    neighbourhoods, reached = Neighbourhoods(part, 1), own
    for _ in range(hops):
        reached = neighbourhoods.senders(reached)
    is_seed = torch.zeros_like(train_mask)
    is_seed[reached] = train_mask[reached]
    is_seed[own] = False
    return is_seed.nonzero().view(-1)
