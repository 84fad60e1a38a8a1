"""The most exact way to treat a boundary for which there is memory and time, chosen when a fit begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Exchange, Fetch, Halo, Isolated
from lightning_gnn_dist.boundary.work import Pass
from lightning_gnn_dist.checks import brief, in_megabytes, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of
from lightning_gnn_dist.layers.budget import free_bytes, ranks_here
from lightning_gnn_dist.layers.reach import Neighbourhoods
from lightning_gnn_dist.partition.advice import bytes_of_part
from lightning_gnn_dist.rules import Count, Positive, check_fields
from lightning_gnn_dist.wire.collectives import gather_numbers

LOST = "Edges are lost: in rounds, SuperNodePartitioner() or averages over rounds (AveragedRounds()) mostly lose less."
LOOKED_AT = 4  # super-epochs whose parts are counted
SMALL = 100_000  # work of a batch, in edges, some ms: less saves no time worth an edge


@dataclass(frozen=True)
class Auto(Boundary):
    """The most exact boundary that costs no more than is allowed, chosen when a fit begins; ``"auto"`` is ``Auto()``.

    That is the deepest :class:`Halo`, of as many hops as the sampler at most, otherwise :class:`Isolated`. It must fit
    into memory: the largest part, with all nodes that come along. And it must not multiply the work: where batches
    reach all of a part, as with :class:`WholePartSampler`, every rank computes what came along as well, but for what
    a module with ``layers()`` leaves out, whose layers compute the rows that the next one reads. Of parts that
    change, those of the first four super-epochs are looked at. All ranks choose the same (with :class:`Elastic` each
    for itself), and a line in the log says what. A resumed fit keeps what the checkpoint's has chosen.

    Args:
        bytes: Most bytes that a part may take in RAM. Default: half of the rank's share of the memory that is free when
            the fit begins, on the host that has least.
        exchange: Whether to take :class:`Exchange` where the fit can use it (by its sampler, module and strategy, with
            parts for good). It then needs memory for one hop, and sends rows in every step. Of a module with
            ``layers()`` it is supposed that ``forward()`` returns :func:`through_layers`.
        work: Most that all ranks together may compute in a pass, in times of what one process would. Batches of some
            milliseconds may always be computed. None: any amount.
    """

    bytes: Count | None = None
    exchange: bool = False
    work: Positive | None = 2.0

    def __post_init__(self) -> None:
        check_fields(self)

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        raise NotImplementedError("A fit takes what has been chosen in its place.")


class Allowed(NamedTuple):
    """What a boundary may cost.

    Attributes:
        bytes: Bytes of the largest part in RAM.
        times: Work of all ranks, in times of one process.
    """

    bytes: int
    times: float


def allowed_by(asked: Auto, num_ranks: int) -> Allowed:
    """Return what a boundary may cost a rank, by what is free on its host."""
    room = free_bytes() // ranks_here(num_ranks) // 2 if asked.bytes is None else asked.bytes
    return Allowed(room, math.inf if asked.work is None else asked.work)


class Cost(NamedTuple):
    """What a boundary costs.

    Attributes:
        boundary: The boundary.
        bytes: Bytes that the largest part takes with it in RAM.
        times: Work of all ranks in a pass, in times of one process.
        is_quick: Whether a batch is so small that its work does not matter.
    """

    boundary: Boundary
    bytes: int
    times: float = 1.0
    is_quick: bool = False

    def is_within(self, allowed: Allowed) -> bool:
        return self.bytes <= allowed.bytes and (self.is_quick or self.times <= allowed.times)

    def __str__(self) -> str:
        return f"{in_megabytes(self.bytes)} for the largest part, and {self.times:.1f} times the work of one process"


class Part(NamedTuple):
    """What a rank holds at a time of the fit.

    Attributes:
        residents: Its nodes without a halo.
        seeds: Those that it learns from.
    """

    residents: Tensor
    seeds: Tensor


class Choice(NamedTuple):
    """What has been chosen, and why not what is more exact.

    Attributes:
        boundary: What has been chosen.
        cost: What it costs. None for ``Isolated``, which is not counted.
        better: What the next more exact boundary costs. None if there is none.
    """

    boundary: Boundary
    cost: Cost | None
    better: Cost | None

    def told(self, allowed: Allowed) -> str:
        """The choice in words."""
        takes = "" if self.cost is None else f": it takes {self.cost}"
        found = f'boundary="auto" is {short_name(self.boundary)}{takes}.'
        limit = "" if allowed.times == math.inf else f" and {allowed.times:g} times"
        limits = f"{in_megabytes(allowed.bytes)}{limit} are allowed."
        if self.better is None:
            return f"{found} {limits}"
        lost = f" {LOST}" if isinstance(self.boundary, Isolated) else ""
        return f"{found} {short_name(self.better.boundary)} would take {self.better}. {limits}{lost}"


def chosen(
    allowed: Allowed, graph: Graph, parts: Iterable[Part], steps: Pass, device: torch.device, *, exchanges: bool
) -> tuple[Boundary, str]:
    """Return the most exact boundary that all ranks can afford, and a line for the log. Collective, as a fit begins.

    Args:
        allowed: What it may cost this rank.
        graph: The whole graph.
        parts: What this rank holds, at some times of the fit.
        steps: A pass over the training nodes.
        device: Where the ranks exchange numbers.
        exchanges: Whether ranks can exchange rows in this fit.
    """
    most_held, most_work = _counted(graph, parts, steps)
    rooms, *of_hops = zip(*gather_numbers([allowed.bytes, *most_held, *most_work], device), strict=True)
    held, work = of_hops[: steps.num_layers], of_hops[steps.num_layers :]
    allowed = allowed._replace(bytes=min(rooms))
    choice = choose(costs(graph, held, work, steps), allowed, exchanges=exchanges)
    return choice.boundary, choice.told(allowed)


def chosen_here(allowed: Allowed, graph: Graph, parts: Sequence[Iterable[Part]], steps: Pass) -> Boundary:
    """Return what :func:`chosen` would, without other ranks, of the ``parts`` of each rank."""
    counted = [_counted(graph, of_rank, steps) for of_rank in parts]
    held, work = (list(zip(*of_ranks, strict=True)) for of_ranks in zip(*counted, strict=True))
    return choose(costs(graph, held, work, steps), allowed, exchanges=False).boundary


def _counted(graph: Graph, parts: Iterable[Part], steps: Pass) -> tuple[list[int], list[int]]:
    """Return the most bytes of some parts, and the most work of a batch of them, with halos of 1, 2 ... hops."""
    neighbourhoods, held, work = Neighbourhoods(graph, steps.num_layers), [], []
    for part in parts:
        hops = neighbourhoods.hops(part.residents)
        edges = torch.stack([degrees_of(graph.indptr, nodes).sum() for nodes in hops[:-1]]).cumsum(0)
        nodes = torch.tensor([nodes.numel() for nodes in hops]).cumsum(0)[1:]
        held.append(bytes_of_part(graph, nodes, edges))
        work.append(steps.with_halos(graph, neighbourhoods, hops, part.seeds))
    return torch.stack(held).amax(0).tolist(), torch.tensor(work).amax(0).tolist()


def costs(graph: Graph, held: Sequence[Sequence[int]], work: Sequence[Sequence[int]], steps: Pass) -> list[Cost]:
    """Return what halos of 1, 2 ... hops cost, by the bytes and the work of each rank."""
    of_one = steps.of_one(graph)
    return [
        Cost(Halo(hops), max(num_bytes), steps.times(of_ranks, of_one), max(of_ranks) <= SMALL)
        for hops, (num_bytes, of_ranks) in enumerate(zip(held, work, strict=True), 1)
    ]


def short_name(boundary: Boundary) -> str:
    """How a boundary is written, without what is not given."""
    return f"Halo({boundary.hops})" if isinstance(boundary, Halo) else brief(boundary)


def kept(name: str, num_hops: int, *, exchanges: bool) -> tuple[Boundary, str]:
    """Return what the fit of a checkpoint chose, for which there may be less memory now, and a line for the log.

    Args:
        name: The short name of what it chose.
        num_hops: Hops of the sampler.
        exchanges: Whether ranks can exchange rows in this fit.
    """
    known = {short_name(boundary): boundary for boundary in candidates(num_hops, exchanges=exchanges)}
    if name not in known:
        raise ValueError(
            f'boundary="auto" was {name} in the fit of the checkpoint, and can be {", ".join(known)} in this one: '
            "resume with that fit's sampler, holding, module and strategy, or name the boundary that you want."
        )
    return known[name], f'boundary="auto" is {name}, as in the fit of the checkpoint.'


def boundary_of(given: Boundary | str, *, of_edges: bool, is_in_shards: bool, is_for_parts: bool) -> Boundary:
    """Return the boundary that a data module is given, or what ``"auto"``, the default of all of them, is for it.

    Around edges it is ``Fetch()``, which loses nothing where parts end, and ``Isolated()`` for settings that are about
    parts. Around nodes it is the most exact one that fits into memory, chosen when a fit begins; in shards, whose ranks
    cannot count that beforehand, ``Isolated()``.

    Args:
        given: What the user gives.
        of_edges: Whether seeds are edges.
        is_in_shards: Whether no host has the graph.
        is_for_parts: Whether other settings are about parts: a ``holding``, or a sampler of whole parts.
    """
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f'boundary must be "auto", or an object such as Isolated() or Halo(), got {shown(given)}.')
        given = Auto()
    if not isinstance(given, Auto) or given != Auto():
        return given
    if of_edges:
        return Isolated() if is_for_parts else Fetch()
    return Isolated() if is_in_shards else given


def candidates(num_hops: int, *, exchanges: bool) -> list[Boundary]:
    """What can be chosen, the most exact first."""
    halos = [Halo(hops) for hops in range(num_hops, 0, -1)]
    return [*([Exchange()] if exchanges else []), *halos, Isolated()]


def choose(halos: Sequence[Cost], allowed: Allowed, *, exchanges: bool) -> Choice:
    """Choose the most exact boundary that costs no more than is allowed.

    Args:
        halos: What halos of 1, 2 ... hops cost.
        allowed: What one may cost.
        exchanges: Whether ranks can exchange rows.
    """
    exchange = [Cost(Exchange(), halos[0].bytes)] if exchanges else []
    farther = [cost for before, cost in pairwise(halos) if cost.bytes > before.bytes]  # a hop that brings something
    better = None
    for cost in [*exchange, *reversed([halos[0], *farther])]:
        if cost.is_within(allowed):
            return Choice(cost.boundary, cost, better)
        better = cost
    return Choice(Isolated(), None, better)
