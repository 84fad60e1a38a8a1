"""How the edges that leave a part are treated. ``Auto`` chooses how when a fit begins, by memory and time:

work of a batch = for each layer the edges + 8 nodes that its rank holds, but no more than the batch reaches
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.batches.batches import Learning
from lightning_gnn_dist.batches.source import Finish
from lightning_gnn_dist.checks import Count, Hops, brief, check_fields, in_megabytes, shown
from lightning_gnn_dist.graph.graph import Graph, bytes_of_part, bytes_per_node
from lightning_gnn_dist.graph.rows import Lookup, degrees_of
from lightning_gnn_dist.layers.choice import ALL, EDGES_OF_A_NODE, Neighbourhoods
from lightning_gnn_dist.partition.base import learned_from
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.collectives import gather_numbers
from lightning_gnn_dist.wire.memory import free_bytes, ranks_here

LOST = "Edges are lost: in rounds, SuperNodePartitioner() or averages over rounds (AveragedRounds()) mostly lose less."
TIMES = 2.0  # that all ranks together may compute in a pass, in times of one process
SMALL = 100_000  # work of a batch, in edges, some ms: less saves no time worth an edge
Holds = Iterable[tuple[Tensor, Tensor]]  # nodes that a rank holds without a halo, and those of them that it learns from
EdgesInto: TypeAlias = Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]


class Outside:
    """What batches of a rank's part know, in a run, of nodes outside it beside what the part has.

    Args:
        home: Where the graph lives.
    """

    def __init__(self, home: Any) -> None:
        self.home = home

    def learning(self, part: Graph, inputs: Tensor | None) -> Learning:
        """Return what the one batch of a pass is made of, where ranks exchange rows in every step. Collective.

        Args:
            part: What the rank holds.
            inputs: A number for each seed, that batches hold as ``input_id``.
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
    """

    sees_whole_graph: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False
    takes_shards: ClassVar[bool] = False
    takes_edges: ClassVar[bool] = False

    def check_fits(self, graph: Graph) -> None:  # noqa: B027  # optional
        """Refuse a graph that this way cannot handle."""

    def check_settings(self, settings: Any) -> None:  # noqa: B027  # optional
        """Refuse settings of batches that do not go with it."""

    def check_in_fit(self, trainer: Trainer) -> None:  # noqa: B027  # optional
        """Refuse a strategy, a precision or a module with which several ranks cannot treat a boundary so."""

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
    every rank: limit its bytes.

    Args:
        hops: How far from the part's nodes others come along. More hops than the model has layers are of no use.
        bytes: Most bytes that the arrays of these nodes may take. Nearer hops come first, and of a hop the nodes with
            the most edges into the hop before.
    """

    hops: Hops = 1
    bytes: Count | None = None
    takes_shards = takes_edges = True

    def __post_init__(self) -> None:
        check_fields(self)

    def check_fits(self, graph: Graph) -> None:
        per_node = bytes_per_node(graph)
        if self.bytes is not None and self.bytes < per_node:
            raise ValueError(
                f"{self} has no room for a single node, whose arrays take {per_node} "
                "bytes: allow more, or leave the halo out."
            )

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        room = None if self.bytes is None else self.bytes // bytes_per_node(graph)
        held = [residents]
        while len(held) <= self.hops and held[-1].numel():
            known = Lookup(torch.cat(held))
            pieces = (senders[~known.contains(senders)] for _, senders in edges_into(held[-1]))
            nodes, edges = _counted([senders.unique(return_counts=True) for senders in pieces])
            if room is not None:
                nodes = nodes[edges.argsort(descending=True, stable=True)[:room]].sort().values
                room -= nodes.numel()
            held.append(nodes)
        return held[1:]


def _counted(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the distinct nodes of several pieces, increasing, and the sums of their counts."""
    nodes, at = torch.cat([ids for ids, _ in pieces]).unique(return_inverse=True)
    return nodes, torch.zeros_like(nodes).index_add_(0, at, torch.cat([counts for _, counts in pieces]))


@dataclass(frozen=True)
class Auto(Boundary):
    """The most exact boundary that costs no more than is allowed, chosen when a fit begins; ``"auto"`` is ``Auto()``.

    That is the deepest :class:`Halo`, of as many hops as the sampler at most, otherwise :class:`Isolated`. It must fit
    into memory: the largest part, with all nodes that come along. And all ranks together must compute at most twice
    what one process would: batches that reach all of a part, as with :class:`WholePartSampler`, are computed with what
    came along. Of a module with ``layers()`` the rows count that seeds reach, and batches of some milliseconds may
    always be computed. Of parts that change, those of the first four super-epochs are looked at. All ranks choose the
    same (with :class:`Elastic` each for itself), and a line in the log says what. A resumed fit keeps what the
    checkpoint's has chosen.

    Args:
        bytes: Most bytes that a part may take in RAM. Default: half of the rank's share of the memory that is free when
            the fit begins, on the host that has least.
    """

    bytes: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        raise NotImplementedError("A fit takes what has been chosen in its place.")


class Pass(NamedTuple):
    """A pass over all training nodes.

    Attributes:
        sampler: Draws batches.
        batch_size: Seeds of a batch, at most.
        learned: Seeds of each rank.
        has_layers: Whether each layer of the model computes only the rows that the next one reads.
    """

    sampler: Sampler
    batch_size: int
    learned: Sequence[int]
    has_layers: bool

    def work(self, neighbourhoods: Neighbourhoods, seeds: Tensor, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return the work of a batch of a rank that holds so many nodes, and edges into them, the same shape."""
        if self.has_layers and isinstance(self.sampler, WholePartSampler):
            of_layers = list(zip(*neighbourhoods.of(seeds), strict=False))  # nodes and edges, the last layer first
            return sum(
                (edges.clamp(max=most) + EDGES_OF_A_NODE * nodes.clamp(max=few) for few, most in of_layers), 0 * nodes
            )
        return (self.sampler.num_hops * (edges + EDGES_OF_A_NODE * nodes)).clamp(max=self._most())

    def _most(self) -> int:
        """Return the work of a batch however much a rank holds; 0 where that does not change it."""
        if not isinstance(self.sampler, NeighborSampler):
            return ALL if isinstance(self.sampler, WholePartSampler) else 0
        drawn, work, found = self.sampler.num_neighbors, 0.0, float(self.batch_size)
        of_types = [drawn] if isinstance(drawn, Sequence) else drawn.values()
        for hop, limits in enumerate(zip(*of_types, strict=True)):
            edges = found * (math.inf if -1 in limits else sum(limits))
            work += (self.sampler.num_hops - hop) * (edges + EDGES_OF_A_NODE * found)
            found = edges
        return int(min(work, ALL))

    def times(self, of_ranks: Sequence[int], of_one: int) -> float:
        """Return what ranks compute in all, whose batches take so much work, in times of one process."""
        batches, alone = (max(1, -(-seeds // self.batch_size)) for seeds in (max(self.learned), sum(self.learned)))
        return batches * sum(of_ranks) / (alone * of_one) if of_one else 1.0


def chosen(
    asked: Auto,
    graph: Graph,
    parts: Sequence[Holds],
    steps: Pass,
    *,
    on_host: int,
    device: torch.device | None = None,
) -> tuple[Boundary, str]:
    """Return the most exact boundary that all ranks can afford, and a line for the log.

    Args:
        asked: What the user asks for.
        graph: The whole graph.
        parts: What each rank holds, at some times of the fit.
        steps: A pass over the training nodes.
        on_host: How many parts may lie on one host.
        device: Where ranks exchange numbers: ``parts`` are then those of this rank alone. Collective, as a fit begins.
    """
    allowed = free_bytes() // ranks_here(on_host) // 2 if asked.bytes is None else asked.bytes
    of_ranks = [[allowed, *_measured(graph, each, steps)] for each in parts]
    of_ranks = of_ranks if device is None else gather_numbers(of_ranks[0], device)
    return choose(graph, [rest for _, *rest in of_ranks], steps, min(row[0] for row in of_ranks))


def _measured(graph: Graph, parts: Holds, steps: Pass) -> list[int]:
    """Return the most bytes of some parts with halos of 1, 2 ... hops, and then the most work of a batch of them."""
    neighbourhoods, found = Neighbourhoods(graph, steps.sampler.num_hops), list[Tensor]()
    for residents, seeds in parts:
        hops = neighbourhoods.hops(residents)
        nodes = torch.tensor([each.numel() for each in hops]).cumsum(0)[1:]
        edges = torch.stack([degrees_of(graph.indptr, each).sum() for each in hops[:-1]]).cumsum(0)
        work = steps.work(neighbourhoods, seeds, nodes, edges)
        found.append(torch.cat([bytes_of_part(graph, nodes, edges), work]))
    return torch.stack(found).amax(0).tolist()


def choose(graph: Graph, of_ranks: Sequence[Sequence[int]], steps: Pass, allowed: int) -> tuple[Boundary, str]:
    """Return the most exact boundary that all ranks can afford, and a line for the log.

    Args:
        graph: The whole graph.
        of_ranks: What :func:`_measured` returns on each rank.
        steps: A pass over the training nodes.
        allowed: The bytes that a part may take.
    """
    num_hops, better = steps.sampler.num_hops, ""
    seeds, sizes = learned_from(graph, graph.types.seeds).nonzero().view(-1), (graph.num_nodes, graph.num_edges)
    of_one = int(steps.work(Neighbourhoods(graph, num_hops), seeds, *map(torch.tensor, sizes)))
    most = [max(column) for column in zip(*of_ranks, strict=True)]
    for hops in range(num_hops, 0, -1):
        held, work = most[hops - 1], [row[num_hops + hops - 1] for row in of_ranks]
        if hops > 1 and held == most[hops - 2]:  # a hop that brings nothing
            continue
        times = steps.times(work, of_one)
        cost = f"Halo({hops}) takes {in_megabytes(held)} for the largest part, and {times:.1f} times the work"
        if held <= allowed and (times <= TIMES or max(work) <= SMALL):
            return Halo(hops), f'boundary="auto" is Halo({hops}). {cost} of one process.{better}'
        better = f" {cost}; {in_megabytes(allowed)} and {TIMES:g} times are allowed."
    return Isolated(), f'boundary="auto" is Isolated().{better} {LOST}'


def short_name(boundary: Boundary) -> str:
    """How a boundary is written, without what is not given."""
    return f"Halo({boundary.hops})" if isinstance(boundary, Halo) else brief(boundary)


def kept(name: str, num_hops: int) -> tuple[Boundary, str]:
    """Return what the fit of a checkpoint chose, for which there may be less memory now, and a line for the log.

    Args:
        name: The short name of what it chose.
        num_hops: Hops of the sampler.
    """
    known = {short_name(each): each for each in (*map(Halo, range(num_hops, 0, -1)), Isolated())}
    if name not in known:
        raise ValueError(
            f'boundary="auto" was {name} in the fit of the checkpoint, and can be {", ".join(known)} in this one: '
            "resume with that fit's sampler, holding, module and strategy, or name the boundary that you want."
        )
    return known[name], f'boundary="auto" is {name}, as in the fit of the checkpoint.'


def boundary_of(given: Boundary | str, otherwise: Boundary) -> Boundary:
    """Return the boundary that a data module is given, or what ``"auto"``, the default of all of them, is for it."""
    if isinstance(given, str) and given != "auto":
        raise ValueError(f'boundary must be "auto", or an object such as Isolated() or Halo(), got {shown(given)}.')
    return otherwise if isinstance(given, str) or (isinstance(given, Auto) and given == Auto()) else given
