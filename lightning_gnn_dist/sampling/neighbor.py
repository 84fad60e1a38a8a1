"""Neighbour sampling (Hamilton, Ying, Leskovec, NeurIPS 2017, arXiv:1706.02216), many batches at once.

    N_0 = seeds,   N_h = nodes first seen among sample(in-neighbours of v, s_h) for v in N_(h-1)

The bulk formulation is that of Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909); a row of their product
``Q A`` with a one-hot ``Q`` is a row of the graph's CSR, so the product is never formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_gnn_dist.checks import check_fields, shown
from lightning_gnn_dist.engine.kernels import Array, Draws, sample
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, edge_types_of, sample_hops
from lightning_gnn_dist.engine.weighted import Rule, Weight, weights_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.sampling.base import check_bulk, check_numbers

_EXAMPLE = "NeighborSampler([15, 10])"
_TYPED_EXAMPLE = 'NeighborSampler({("author", "writes", "paper"): [15, 10], ...})'


class PerType(dict[EdgeType, tuple[int, ...]]):
    """Numbers of neighbours by edge type. Nobody changes them, so that samplers have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class NeighborSampler:
    """Draw up to ``num_neighbors[h]`` in-neighbours of every node found at hop ``h``.

    A node is expanded once, with the number that belongs to the hop at which it was first seen, as in PyG's
    ``NeighborLoader``. Which neighbours it gets depends on the batch's key, the hop and the node alone. In a graph with
    types a node draws so many of each edge type that leads to it.

    With ``weight``, edges are drawn one after the other in proportion to their weight: among those not drawn yet, or,
    with ``replace``, among all. ``batch.edge_weight`` is not corrected for it: it holds the graph's numbers, if the
    graph has any. Edges of weight 0 are drawn when a row has no others left. The first batch, and the first one
    after the weights have changed, makes tables of them, 8 bytes for each edge of the graph, in RAM; none where the
    weights are in a file, where rows are read whole to be drawn from.

    Args:
        num_neighbors: Neighbours to draw per node, one number per hop; -1 takes all of them, each once. For a graph
            with types also a list for each edge type, ``{("author", "writes", "paper"): [10, 5], ...}``, where 0 leaves
            a type out.
        replace: Draw with replacement: exactly so many edges for every node that has any.
        weight: Name of the graph's edge array that says how likely an edge is. Default: all are equally likely.
    """

    num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]]
    replace: bool = False
    weight: Weight = None

    def __post_init__(self) -> None:
        given: Any = self.num_neighbors
        is_typed = isinstance(given, Mapping)
        given = _per_type(given) if is_typed else check_numbers("num_neighbors", given, _EXAMPLE, or_all=True)
        object.__setattr__(self, "num_neighbors", given)
        check_fields(self)

    @property
    def num_hops(self) -> int:
        if isinstance(self.num_neighbors, Mapping):
            return len(next(iter(self.num_neighbors.values())))
        return len(self.num_neighbors)

    @property
    def per_hop(self) -> Sequence[int]:
        """The numbers for a graph without types."""
        if isinstance(self.num_neighbors, Mapping):
            raise ValueError(
                f"num_neighbors has numbers for {len(self.num_neighbors)} edge types, and this graph has no types: "
                f"give one number per hop, as in {_EXAMPLE}."
            )
        return self.num_neighbors

    @property
    def leaves_types_out(self) -> bool:
        """Whether some hop draws no edge of some type."""
        given = self.num_neighbors
        return isinstance(given, Mapping) and any(0 in numbers for numbers in given.values())

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        asked, fanouts, kinds = check_bulk(graph, seeds, keys), self.of_types(graph.types), edge_types_of(graph.types)
        draws = bool((fanouts >= 0).any())
        weights = None if self.weight is None else weights_of(graph, self.weight, draws=draws)
        of_edges, rule = kinds if len(kinds) else None, Rule(weights, self.replace)
        how = [Draws(of_edges, fanouts, typed_keys(*key, *fanouts.shape), rule) for _, key in asked]
        return [
            sample_hops(graph, ids, len(fanouts), sample, draws, with_kinds=graph.types.have_names)
            for (ids, _), draws in zip(asked, how, strict=True)
        ]

    def of_types(self, types: TypeNames) -> Array:
        """The numbers of each hop and edge type, int64, shape (hops, types); those of other types are refused.

        A graph without types counts as one of one type.
        """
        if self.weight is not None and types.have_names:
            raise ValueError(f"weight ({self.weight!r}) draws from graphs without types: leave it out for this one.")
        given = self.num_neighbors if types.have_names else self.per_hop
        if not isinstance(given, Mapping):
            return np.repeat(np.array(given, np.int64)[:, None], len(types.edge_types), 1)
        if unknown := [kind for kind in given if kind not in types.edge_types]:
            raise ValueError(
                f"num_neighbors names the edge type {unknown[0]}, and the graph has {shown(list(types.edge_types))}."
            )
        if missing := [kind for kind in types.edge_types if kind not in given]:
            none = [0] * self.num_hops
            raise ValueError(
                f"num_neighbors has no numbers for the edge type {missing[0]}: give it some, or {none} to leave it out."
            )
        return np.array([given[kind] for kind in types.edge_types], np.int64).T.copy()


def _per_type(given: Mapping[Any, Sequence[int]]) -> PerType:
    """Refuse names that are no edge types, and lists that are not of one length."""
    found = PerType()
    for name, numbers in given.items():
        kind = tuple(name.split("__")) if isinstance(name, str) else name
        if not isinstance(kind, tuple) or len(kind) != 3 or not all(isinstance(word, str) for word in kind):
            raise ValueError(
                f"num_neighbors must be by edge types, (source, name, destination), got {shown(name)}: write "
                f"{_TYPED_EXAMPLE}."
            )
        if kind in found:
            raise ValueError(f"num_neighbors names the edge type {kind} twice.")
        found[kind] = check_numbers(f"num_neighbors of {kind}", numbers, _TYPED_EXAMPLE, or_all=True, or_none=True)
    if not found:
        raise ValueError(f"num_neighbors is empty: give numbers for each edge type, as in {_TYPED_EXAMPLE}.")
    lengths = {len(numbers) for numbers in found.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"num_neighbors must list as many hops for each edge type, got lists of {sorted(lengths)}: write 0 where a "
            "hop takes none."
        )
    return found
