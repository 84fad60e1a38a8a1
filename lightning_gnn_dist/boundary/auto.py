"""The most exact way to treat a boundary for which there is memory and time, chosen when a fit begins.

work of a batch = for each layer the edges + 8 nodes that its rank holds, but no more than the batch reaches
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Halo, Isolated
from lightning_gnn_dist.checks import brief, in_megabytes, shown
from lightning_gnn_dist.graph.graph import Graph, bytes_of_part
from lightning_gnn_dist.graph.rows import degrees_of
from lightning_gnn_dist.layers.choice import ALL, EDGES_OF_A_NODE, Neighbourhoods
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.base import learned_from
from lightning_gnn_dist.rules import Count, check_fields
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.collectives import gather_numbers
from lightning_gnn_dist.wire.memory import free_bytes, ranks_here

LOST = "Edges are lost: in rounds, SuperNodePartitioner() or averages over rounds (AveragedRounds()) mostly lose less."
TIMES = 2.0  # that all ranks together may compute in a pass, in times of one process
SMALL = 100_000  # work of a batch, in edges, some ms: less saves no time worth an edge

Parts = Iterable[tuple[Tensor, Tensor]]  # nodes that a rank holds without a halo, and those of them that it learns from


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
        exchange: Whether to take :class:`Exchange` where the fit can use it (by its sampler, module and strategy, with
            parts for good). It then needs memory for one hop, and sends rows in every step. Of a module with
            ``layers()`` it is supposed that ``forward()`` returns :func:`through_layers`.
    """

    bytes: Count | None = None
    exchange: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def offered(self) -> Boundary | None:
        """Return what may be taken before a halo, where a fit suits it and there is memory for one hop."""
        found: Boundary | None = extension("exchange")() if self.exchange else None
        return found

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
    parts: Sequence[Parts],
    steps: Pass,
    *,
    on_host: int,
    device: torch.device | None = None,
    offered: Boundary | None = None,
) -> tuple[Boundary, str]:
    """Return the most exact boundary that all ranks can afford, and a line for the log.

    Args:
        asked: What the user asks for.
        graph: The whole graph.
        parts: What each rank holds, at some times of the fit.
        steps: A pass over the training nodes.
        on_host: How many parts may lie on one host.
        device: Where ranks exchange numbers: ``parts`` are then those of this rank alone. Collective, as a fit begins.
        offered: What is taken before a halo where there is memory for one hop.
    """
    allowed = free_bytes() // ranks_here(on_host) // 2 if asked.bytes is None else asked.bytes
    of_ranks = [[allowed, *_counted(graph, each, steps)] for each in parts]
    of_ranks = of_ranks if device is None else gather_numbers(of_ranks[0], device)
    return choose(graph, [rest for _, *rest in of_ranks], steps, min(row[0] for row in of_ranks), offered=offered)


def _counted(graph: Graph, parts: Parts, steps: Pass) -> list[int]:
    """Return the most bytes of some parts with halos of 1, 2 ... hops, and then the most work of a batch of them."""
    neighbourhoods, found = Neighbourhoods(graph, steps.sampler.num_hops), list[Tensor]()
    for residents, seeds in parts:
        hops = neighbourhoods.hops(residents)
        nodes = torch.tensor([each.numel() for each in hops]).cumsum(0)[1:]
        edges = torch.stack([degrees_of(graph.indptr, each).sum() for each in hops[:-1]]).cumsum(0)
        work = steps.work(neighbourhoods, seeds, nodes, edges)
        found.append(torch.cat([bytes_of_part(graph, nodes, edges), work]))
    return torch.stack(found).amax(0).tolist()


def choose(
    graph: Graph, of_ranks: Sequence[Sequence[int]], steps: Pass, allowed: int, *, offered: Boundary | None
) -> tuple[Boundary, str]:
    """Return the most exact boundary that all ranks can afford, and a line for the log.

    Args:
        graph: The whole graph.
        of_ranks: What :func:`_counted` returns on each rank.
        steps: A pass over the training nodes.
        allowed: The bytes that a part may take.
        offered: What is taken before a halo where there is memory for one hop.
    """
    num_hops, better = steps.sampler.num_hops, ""
    seeds, sizes = learned_from(graph, graph.types.seeds).nonzero().view(-1), (graph.num_nodes, graph.num_edges)
    of_one = int(steps.work(Neighbourhoods(graph, num_hops), seeds, *map(torch.tensor, sizes)))
    most = [max(column) for column in zip(*of_ranks, strict=True)]
    if offered is not None and most[0] <= allowed:
        return offered, f'boundary="auto" is {brief(offered)}: {in_megabytes(most[0])} for the largest part.'
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


def kept(name: str, num_hops: int, *, offered: Boundary | None) -> tuple[Boundary, str]:
    """Return what the fit of a checkpoint chose, for which there may be less memory now, and a line for the log.

    Args:
        name: The short name of what it chose.
        num_hops: Hops of the sampler.
        offered: What could be taken before a halo in this fit.
    """
    halos = [Halo(hops) for hops in range(num_hops, 0, -1)]
    known = {short_name(each): each for each in (*([] if offered is None else [offered]), *halos, Isolated())}
    if name not in known:
        raise ValueError(
            f'boundary="auto" was {name} in the fit of the checkpoint, and can be {", ".join(known)} in this one: '
            "resume with that fit's sampler, holding, module and strategy, or name the boundary that you want."
        )
    return known[name], f'boundary="auto" is {name}, as in the fit of the checkpoint.'


_PLAIN = Auto()


def boundary_of(given: Boundary | str, otherwise: Boundary) -> Boundary:
    """Return the boundary that a data module is given, or what ``"auto"``, the default of all of them, is for it."""
    if isinstance(given, str) and given != "auto":
        raise ValueError(f'boundary must be "auto", or an object such as Isolated() or Halo(), got {shown(given)}.')
    return otherwise if isinstance(given, str) or given == _PLAIN else given
