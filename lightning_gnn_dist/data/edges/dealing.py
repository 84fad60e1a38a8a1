"""Deals edges, or pairs of nodes, to validation and testing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation

SPLIT, FALSE_ENDS = range(2)  # what is drawn


def dealt(total: int, shares: Mapping[str, float], seed: int) -> dict[str, Tensor]:
    """Return which of all pairs are held back under each name, if any are."""
    counts = {name: round(share * total) for name, share in shares.items()}
    if not total and any(shares.values()):
        raise ValueError(
            "There are no edges to hold back (or pairs, without loops): choose an edge type that has some."
        )
    for name, share in shares.items():
        if share and not counts[name]:
            raise ValueError(
                f"{name}={share} of {total} edges (or pairs, without loops) is none: give a larger share, or {name}=0."
            )
    if any(counts.values()) and sum(counts.values()) == total:
        raise ValueError(
            f"val and test would hold all {total} edges (or pairs, without loops), and none is left to train on: give "
            "smaller shares."
        )
    order = permutation(total, seed + Purpose.LINKS, SPLIT)[: sum(counts.values())]
    held = dict(zip(counts, order.split(list(counts.values())), strict=True))
    return {name: which for name, which in held.items() if len(which)}


def held_pairs(
    shares: Mapping[str, float | Tensor], can_be_held: Tensor, pair_of_edge: Tensor, seed: int
) -> dict[str, Tensor]:
    """Return which pairs of nodes are held back under each name: a share of them, or those of edges that are marked.

    Args:
        shares: For each name the share, or a boolean for each edge.
        can_be_held: The pairs that shares are of.
        pair_of_edge: The pair of each edge.
        seed: Decides which pairs a share is.
    """
    marked = {name: share for name, share in shares.items() if isinstance(share, Tensor)}
    if not marked:
        dealt_out = dealt(can_be_held.numel(), {name: float(share) for name, share in shares.items()}, seed)
        return {name: can_be_held[which] for name, which in dealt_out.items()}
    held = {name: pair_of_edge[mask].unique() for name, mask in marked.items()}
    held = {name: pairs[torch.isin(pairs, can_be_held)] for name, pairs in held.items()}
    if empty := [name for name, pairs in held.items() if not pairs.numel()]:
        raise ValueError(f"{empty[0]} marks no edge that can be held back (loops, and edges without a label, cannot).")
    together, counts = torch.cat(list(held.values())).unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(
            f"val and test both mark edges between the same two nodes ({int((counts > 1).sum())} such pairs): both "
            "directions and all copies are held back together, so mark a pair in one of them."
        )
    if together.numel() == can_be_held.numel():
        raise ValueError("val and test mark all edges, and none is left to train on: mark fewer.")
    return held


def numbers_of(links: Tensor, num_nodes: int, *, undirected: bool = False) -> Tensor:
    """A number for each edge; if ``undirected``, that of both directions."""
    first, last = (links.amin(0), links.amax(0)) if undirected else links
    return first * num_nodes + last


class Pairs(NamedTuple):
    """The pairs of nodes that edges are between, each direction by itself or both together.

    Attributes:
        numbers: A number for each, increasing.
        of_edge: The place of each edge's among them.
        undirected: Whether both directions are together.
    """

    numbers: Tensor
    of_edge: Tensor
    undirected: bool

    @classmethod
    def of(cls, links: Tensor, num_nodes: int, undirected: bool) -> Pairs:
        numbers, of_edge = numbers_of(links, num_nodes, undirected=undirected).unique(return_inverse=True)
        return cls(numbers, of_edge, undirected)

    def one_direction(self, links: Tensor, seed: int) -> Tensor:
        """Which edges lead in the direction that was drawn for their pair of nodes; loops do."""
        flips = draw_bits(key(seed + Purpose.LINKS, 0, 0, SPLIT), self.numbers)[self.of_edge]
        return (links[0] == links[1]) | ((links[0] < links[1]) ^ flips)
