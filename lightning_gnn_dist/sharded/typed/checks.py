"""What the data module of shards takes of a graph with types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_gnn_dist.boundary.boundary import Boundary, Exchange
from lightning_gnn_dist.boundary.halo_seeds import check_seed_hops
from lightning_gnn_dist.boundary.prices import short_name
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.prepare.shard import Bounds
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


def with_seed_type(bounds: Bounds, seed_type: str | None, path: Path) -> Bounds:
    """Return the bounds, of which those of a typed graph have chosen the type that is learned from."""
    if not have_names(bounds.types):
        if seed_type is not None:
            raise ValueError(f"seed_type ({shown(seed_type)}) is for a graph with types, and that of {path} has none.")
        return bounds
    chosen = bounds.types.seed_type() if seed_type is None else seed_type
    return replace(bounds, types=bounds.types.with_seeds(chosen))


def check_typed_shards(bounds: Bounds, sampler: object, boundary: Boundary) -> None:
    """Refuse numbers of other types, and a boundary that does not take a typed graph, if this is one."""
    if not have_names(bounds.types):
        return
    if isinstance(sampler, NeighborSampler):
        sampler.of_types(bounds.types)
    if isinstance(boundary, Exchange):
        raise ValueError(
            f"boundary={short_name(boundary)} is for graphs without types: take Isolated(), Halo() or Fetch() for this "
            "one."
        )
    check_seed_hops(boundary, is_typed=True)
