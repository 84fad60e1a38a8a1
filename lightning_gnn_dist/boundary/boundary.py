"""How the edges that leave a part are treated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.batches.batches import Learning
from lightning_gnn_dist.batches.source import Finish
from lightning_gnn_dist.checks import brief, shown
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, bytes_per_node
from lightning_gnn_dist.graph.rows import Lookup, induced_rows, senders_by_row, starts_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.layers.choice import Neighbourhoods
from lightning_gnn_dist.rules import Count, Hops, Natural, check_fields

EdgesInto: TypeAlias = Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]


class Outside:
    """What batches of a rank's part know, in a run, of nodes outside it beside what the part has.

    Args:
        home: Where the graph lives.
    """

    def __init__(self, home: Any) -> None:
        self.home = home

    def learning(self, part: Graph, inputs: Tensor | None, values: ValueCheck) -> Learning:
        """Return what the one batch of a pass is made of, where ranks exchange rows in every step. Collective.

        Args:
            part: What the rank holds.
            inputs: A number for each seed, that batches hold as ``input_id``.
            values: Refuses bad values in what is learned from.
        """
        raise NotImplementedError

    def of_batches(self, part: Graph, *, are_whole: bool) -> tuple[Graph, Finish | None]:
        """Return a part as its batches show it, and what makes of each what is handed out.

        Args:
            part: What the rank holds.
            are_whole: Whether a batch is the whole part.
        """
        return self.home.shown(part), None

    def refresh(self, super_epoch: int) -> None:
        """Learn anew what batches of a part read of nodes outside it. Collective, at meetings."""

    def close(self) -> None:
        """End the connections. Not collective."""


class Boundary(ABC):
    """What becomes of senders outside a part. To add a way, write a frozen dataclass with the method ``around``.

    Where batches need more of these senders than what came along, ``wrap`` returns what knows it.

    Attributes:
        sees_whole_graph: Whether batches are drawn in the whole graph, and not in a part.
        exchanges: Whether ranks send each other rows in every step. A pass is then one batch, of the whole part.
        keeps_rows: Whether ranks compute rows for each other at meetings.
        takes_shards: Whether it is for graphs of which each rank has a shard.
        takes_edges: Whether seeds may be edges.
        seed_hops: How far from the part training nodes of other ranks are seeds of this one too.
    """

    sees_whole_graph: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False
    takes_shards: ClassVar[bool] = False
    takes_edges: ClassVar[bool] = False
    seed_hops: int = 0

    def check_fits(self, graph: Graph) -> None:  # noqa: B027  # optional
        """Refuse a graph that this way cannot handle."""

    def check_settings(self, settings: Any) -> None:  # noqa: B027  # optional
        """Refuse settings of batches that do not go with it."""

    def check_in_fit(self, trainer: Trainer) -> None:  # noqa: B027  # optional
        """Refuse a strategy, a precision or a module with which several ranks cannot treat a boundary so."""

    def suits(self, settings: Any, trainer: Trainer) -> bool:
        """Return whether :class:`Auto` may take it in a fit, where a user allows that."""
        return False

    def wrap(self, home: Any) -> Outside | None:
        """Return what its batches know, in a run, of nodes outside a part beside what came along; None: nothing."""
        return None

    def hooks(self) -> Sequence[Any]:
        """Return the hooks of meetings that it brings along, in a fit of rounds."""
        return ()

    @abstractmethod
    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        """Return the outside nodes that come along, hop by hop: ids of the whole graph.

        Nodes of the last hop send messages and receive none; all others receive from every node that is there.

        Args:
            graph: The whole graph.
            residents: The nodes of the part.
            edges_into: Yields the edges into some nodes, piece by piece: for each edge, the number of the node among
                these, and the sender.
            seed: Decides everything random.
        """


@dataclass(frozen=True)
class Isolated(Boundary):
    """Senders outside a part send nothing: the edges that leave it are left out."""

    takes_shards = takes_edges = True

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Fetch(Boundary):
    """Senders outside a part are fetched for every batch, as if each rank could have all features.

    Batches are sampled around the part's training nodes in the whole graph. With DDP this is a baseline (GGS in the
    LLCG paper) and saves no memory. On shards it is what distributed samplers do: every step then waits for neighbours
    and features of other ranks.
    """

    sees_whole_graph = takes_shards = takes_edges = True

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return []  # nobody trains on such a part


@dataclass(frozen=True)
class Halo(Boundary):
    """Senders outside a part come along, as copies of their rows: the halo of the part.

    With ``hops=1`` these are the in-neighbours of the part's nodes, so that each node of the part has all of its own
    in-neighbours. They send messages and receive none. With ``hops=2`` they receive as well, and their in-neighbours
    come along in turn; and so on. With as many hops as the model has layers, a part's nodes see all that they would see
    in the whole graph. For chunks drawn at random, and mostly for two hops or more, that is nearly the whole graph on
    every rank, so two limits are offered.

    Args:
        hops: How far from the part's nodes others come along. More hops than the model has layers are of no use.
        bytes: Most bytes that the arrays of these nodes may take. Nearer hops come first, and of a hop the nodes with
            the most edges into the hop before.
        neighbors: Most of them that each node brings along: the first in one random order of all outside senders.
        seed_hops: How far from the part's nodes training nodes are seeds of this rank too, beside their own rank's.
            Replicas then learn from more of the same nodes, so they drift apart less, and no byte is sent. Each pass
            draws as many seeds as the part has, from its own and these. It takes a strategy of rounds, and parts for
            good of a graph without types.
    """

    hops: Hops = 1
    bytes: Count | None = None
    neighbors: Count | None = None
    seed_hops: Natural = 0
    takes_shards = takes_edges = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed_hops >= self.hops:
            raise ValueError(
                f"seed_hops ({self.seed_hops}) must be below hops ({self.hops}), as nodes of the last hop receive "
                f"nothing that a seed could learn from: Halo({self.seed_hops + 1}, seed_hops={self.seed_hops}) has one "
                "hop more."
            )

    def check_fits(self, graph: Graph) -> None:
        per_node = bytes_per_node(graph)
        if self.bytes is not None and self.bytes < per_node:
            raise ValueError(
                f"{self} has no room for a single node, whose arrays take {per_node} "
                "bytes: allow more, or leave the halo out."
            )

    def check_in_fit(self, trainer: Trainer) -> None:
        """Refuse seeds of other ranks where the gradients of all ranks' seeds are exchanged at every step."""
        if self.seed_hops and not isinstance(trainer.strategy, TrainsReplicasApart):
            raise ValueError(
                f"boundary={brief(self)} lets ranks learn from each other's training nodes, as replicas drift apart. "
                f"With {type(trainer.strategy).__name__} they do not, and such nodes would count several times: leave "
                "seed_hops out, or use LocalSGDStrategy(), TMAStrategy() or LLCGStrategy()."
            )

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        room = None if self.bytes is None else self.bytes // bytes_per_node(graph)
        held = [residents]
        while len(held) <= self.hops and held[-1].numel():
            known = Lookup(torch.cat(held))
            pieces = [_left_out(known, *piece) for piece in edges_into(held[-1])]
            if self.neighbors is None:
                nodes, edges = _counted([senders.unique(return_counts=True) for _, senders in pieces])
            else:
                rows, senders = (torch.cat([held[0][:0], *column]) for column in zip(*pieces, strict=True))
                nodes, edges = _some_of_each_row(rows, senders, self.neighbors, seed).unique(return_counts=True)
            if room is not None:
                nodes = nodes[edges.argsort(descending=True, stable=True)[:room]].sort().values
                room -= nodes.numel()
            held.append(nodes)
        return held[1:]


def _left_out(known: Lookup, rows: Tensor, senders: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges from unknown senders."""
    outside = ~known.contains(senders)
    return rows[outside], senders[outside]


def _counted(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the distinct nodes of several pieces, increasing, and the sums of their counts."""
    nodes, at = torch.cat([ids for ids, _ in pieces]).unique(return_inverse=True)
    return nodes, torch.zeros_like(nodes).index_add_(0, at, torch.cat([counts for _, counts in pieces]))


def _some_of_each_row(row: Tensor, senders: Tensor, limit: int, seed: int) -> Tensor:
    """Return, of each row, the ``limit`` senders that come first in one random order of all senders."""
    distinct, which = senders.unique(return_inverse=True)
    by_order = permutation(distinct.numel(), seed + Purpose.SURROUNDINGS, -1)[which].argsort()
    by_row = by_order[row[by_order].argsort(stable=True)]
    row = row[by_row]
    begin = torch.searchsorted(row, row)  # of each entry's row
    return senders[by_row][torch.arange(row.numel()) - begin < limit]


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
