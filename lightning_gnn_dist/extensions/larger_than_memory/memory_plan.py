"""What of a graph lies on the device that trains: a plan in bytes, made without any device.

    edges, what they carry, and narrow arrays of nodes  -> on the device if they fit
    rows of wide arrays of nodes, such as features      -> as many as fit into the rest, those that are read most
    all else                                            -> in RAM

Edges come first: without them batches are drawn in RAM, and all but their held rows crosses the bus.

Which rows are read most is known from expected draws from the training nodes, hop by hop:

    r_0(v) = 1 for each training node v,   r_(h+1)(u) = sum over edges u -> v of f(r_h(v)) min(1, s_h / deg v)
    f(r) = B (1 - exp(-r / B)), the batches of B that hold a node which is drawn r times

s_h is the number of neighbours drawn at hop h. Nothing is drawn, so the order is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, senders_by_row
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

LEAST_WIDTH = 32  # bytes; rows of narrower arrays go where the edges are, and where these are in files through the map


def wide_arrays(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays with rows of at least 32 bytes, but labels, which seeds alone need."""
    return {name: array for name, array in arrays.items() if array[:1].nbytes >= LEAST_WIDTH and name != LABELS}


def placed_by_row(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the wide arrays, and the scales of those that have some: a row is widened where it lies."""
    wide = wide_arrays(arrays)
    return {name: array for name, array in arrays.items() if name in wide or name.removesuffix(SUFFIX) in wide}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a graph.

    Args:
        edges: Of edges, of what they carry, and of narrow arrays of nodes.
        widths: Of a row of the wide arrays of each node type.
        counts: How many nodes each type has.
    """

    edges: int
    widths: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph) -> Sizes:
        """Measure a graph."""
        types = graph.types
        widths = tuple(bytes_per_row(placed_by_row(types.node_arrays[kind])) for kind in types.node_types)
        counts = tuple(types.num_nodes[kind] for kind in types.node_types)
        rows = sum(width * count for width, count in zip(widths, counts, strict=True))
        return cls(graph.num_bytes - rows, widths, counts)

    @property
    def rows(self) -> int:
        """Bytes of all rows of wide arrays."""
        return sum(width * count for width, count in zip(self.widths, self.counts, strict=True))


@dataclass(frozen=True)
class MemoryPlan:
    """What of a graph lies on a device.

    Args:
        sizes: The graph's.
        draws_there: Whether edges and narrow arrays lie there, so that batches are drawn there.
        row_bytes: How many bytes rows of wide arrays may take there.
    """

    sizes: Sizes
    draws_there: bool
    row_bytes: int

    @classmethod
    def of_all(cls, sizes: Sizes) -> MemoryPlan:
        """Return the plan with all on the device."""
        return cls(sizes, draws_there=True, row_bytes=sizes.rows)

    @classmethod
    def within(cls, room: int, sizes: Sizes, *, draws: bool) -> MemoryPlan:
        """Return the plan for a number of bytes; ``draws`` says whether any sampler can draw on a device."""
        draws_there = draws and sizes.edges <= room
        return cls(sizes, draws_there, max(0, min(sizes.rows, room - sizes.edges * draws_there)))

    @property
    def holds_all_rows(self) -> bool:
        return self.row_bytes >= self.sizes.rows

    @property
    def is_all_there(self) -> bool:
        return self.draws_there and self.holds_all_rows

    @property
    def is_all_in_ram(self) -> bool:
        widths = [width for width in self.sizes.widths if width]
        return not self.draws_there and (not widths or self.row_bytes < min(widths))

    @property
    def num_bytes(self) -> int:
        """Bytes that all of it takes on the device, at most."""
        return self.sizes.edges * self.draws_there + self.row_bytes


def expected_reads(graph: Graph, sampler: Sampler, batch_size: int) -> Tensor:
    """Return how many batches of a pass over the training nodes are expected to hold each node: float64, shape (N,).

    A graph without training nodes, as of links, counts all nodes. Of a sampler that is no ``NeighborSampler``, one
    neighbour a hop is counted, and neighbours that are drawn by weight count as equally likely.
    """
    marked = list(graph.types.splits("train").values())
    seeds = torch.cat(marked) if marked else torch.arange(0)
    seeds = seeds if len(seeds) else torch.arange(graph.num_nodes)
    num_batches = max(1, -(-len(seeds) // batch_size))
    drawn = torch.zeros(graph.num_nodes, dtype=torch.float64)
    drawn[seeds] = 1.0
    total, held = drawn.clone(), drawn
    for size in per_hop(sampler, graph.types):
        drawn = _senders_drawn(graph, held, size)
        held = _batches_with(drawn, num_batches)
        total += drawn
    return _batches_with(total, num_batches)


def most_read(reads: Tensor, types: GraphTypes, widths: Sequence[int], room: int) -> list[Tensor]:
    """Return the nodes that are read most of those whose rows fit into ``room`` bytes together.

    Args:
        reads: How often each node is read.
        types: Those of the graph.
        widths: Bytes of a row of each node type. Types with 0 are left out.
        room: Bytes.

    Returns:
        For each node type ids in it, increasing.
    """
    order = reads.argsort(descending=True, stable=True)
    width = torch.tensor(widths)[types.type_of(order)]
    order, width = order[width > 0], width[width > 0]
    chosen = order[width.cumsum(0) <= room].sort().values
    bounds = torch.searchsorted(chosen, torch.tensor(types.offsets)).tolist()
    ends = zip(bounds[:-1], bounds[1:], types.offsets[:-1], strict=True)
    return [chosen[first:last] - start for first, last, start in ends]


def per_hop(sampler: Sampler, types: GraphTypes) -> list[int]:
    """Return how many neighbours of a node are drawn in each hop, -1 for all: 1 if it is no ``NeighborSampler``."""
    if not isinstance(sampler, NeighborSampler):
        return [1] * sampler.num_hops
    return [-1 if (numbers < 0).any() else int(numbers.sum()) for numbers in sampler.of_types(types)]


def _batches_with(drawn: Tensor, num_batches: int) -> Tensor:
    return -num_batches * torch.expm1(-drawn / num_batches)


def _senders_drawn(graph: Graph, held: Tensor, size: int) -> Tensor:
    """Return how often nodes are drawn as senders to nodes that so many batches hold."""
    share = held if size < 0 else held * (size / graph.degrees().clamp(min=1)).clamp(max=1.0)
    drawn = torch.zeros_like(held)
    for rows, senders in senders_by_row(graph.indptr, graph.indices):
        drawn.index_add_(0, senders, share[rows])
    return drawn
