"""The most exact way to treat a boundary for which there is memory, chosen when a fit begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Exchange, Fetch, Halo, Isolated
from lightning_gnn_dist.boundary.prices import bytes_with_halos, short_name
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.budget import free_bytes, ranks_here
from lightning_gnn_dist.rules import Count, check_fields
from lightning_gnn_dist.wire.collectives import gather_numbers

LOOKED_AT = 4  # super-epochs whose parts are counted


@dataclass(frozen=True)
class Auto(Boundary):
    """The most exact boundary that fits into memory, chosen when a fit begins; ``"auto"`` is short for ``Auto()``.

    That is the deepest :class:`Halo`, of as many hops as the sampler at most, otherwise :class:`Isolated`. It fits if
    the largest part does, with all nodes that come along; of parts that change, those of the first four super-epochs
    are looked at. All ranks choose the same (with :class:`Elastic` each for itself), and a line in the log says what. A
    resumed fit keeps what the checkpoint's has chosen.

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

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        raise NotImplementedError("A fit takes what has been chosen in its place.")


class Choice(NamedTuple):
    """What has been chosen, and why not what is more exact.

    Attributes:
        boundary: What has been chosen.
        bytes_held: Bytes that the largest part takes with it in RAM. None for ``Isolated``, which is not counted.
        better: The next more exact boundary, and the bytes of the largest part with it. None if there is none.
    """

    boundary: Boundary
    bytes_held: int | None
    better: tuple[Boundary, int] | None

    def told(self, room: int) -> str:
        """The choice in words."""
        held = "" if self.bytes_held is None else f": the largest part takes {_megabytes(self.bytes_held)}"
        found = f'boundary="auto" is {short_name(self.boundary)}{held}'
        if self.better is None:
            return f"{found}, and {_megabytes(room)} are allowed."
        boundary, num_bytes = self.better
        return (
            f"{found}. {short_name(boundary)} would take {_megabytes(num_bytes)}, and {_megabytes(room)} are allowed."
        )


def room_of(asked: Auto, num_ranks: int) -> int:
    """Return the bytes that a part of this rank may take."""
    return free_bytes() // ranks_here(num_ranks) // 2 if asked.bytes is None else asked.bytes


def chosen(
    room: int, graph: Graph, parts: Iterable[Tensor], num_hops: int, device: torch.device, *, exchanges: bool
) -> tuple[Boundary, str]:
    """Return the most exact boundary that fits on all ranks, and a line for the log. Collective, when a fit begins.

    Args:
        room: The bytes that a part of this rank may take.
        graph: The whole graph.
        parts: The nodes that this rank holds without a halo, at some times of the fit.
        num_hops: Hops of the sampler.
        device: Where the ranks exchange numbers.
        exchanges: Whether ranks can exchange rows in this fit.
    """
    rooms, *held = zip(*gather_numbers([room, *_most_bytes(graph, parts, num_hops)], device), strict=True)
    choice = choose([max(of_ranks) for of_ranks in held], min(rooms), exchanges=exchanges)
    return choice.boundary, choice.told(min(rooms))


def chosen_here(room: int, graph: Graph, parts: Iterable[Tensor], num_hops: int) -> Boundary:
    """Return what :func:`chosen` would, for ranks that have ``room`` bytes each, without them."""
    return choose(_most_bytes(graph, parts, num_hops), room, exchanges=False).boundary


def _most_bytes(graph: Graph, parts: Iterable[Tensor], num_hops: int) -> list[int]:
    """Return the bytes that the largest of some parts takes, with a halo of 1, 2 ... hops."""
    most: list[int] = torch.stack([bytes_with_halos(graph, nodes, num_hops) for nodes in parts]).amax(0).tolist()
    return most


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


def choose(held: Sequence[int], room: int, *, exchanges: bool) -> Choice:
    """Choose the most exact boundary that fits.

    Args:
        held: The bytes of the largest part with a halo of 1, 2 ... hops.
        room: The bytes that it may take.
        exchanges: Whether ranks can exchange rows.
    """
    better = None
    for boundary in candidates(len(held), exchanges=exchanges):
        if isinstance(boundary, Isolated):
            return Choice(boundary, None, better)
        hops = boundary.hops if isinstance(boundary, Halo) else 1
        if isinstance(boundary, Halo) and hops > 1 and held[hops - 1] == held[hops - 2]:
            continue  # nothing is farther away
        if held[hops - 1] <= room:
            return Choice(boundary, held[hops - 1], better)
        better = boundary, held[hops - 1]
    raise AssertionError


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"
