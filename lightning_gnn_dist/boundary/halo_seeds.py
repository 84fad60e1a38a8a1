"""Training nodes of a halo as seeds of the rank that holds it: ``Halo(seed_hops=...)``."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, Halo
from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.evaluation.reach import Neighbourhoods
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import TrainsReplicasApart


def seed_hops(boundary: Boundary) -> int:
    """Return how far from a part its rank learns from training nodes of others; 0: from its own alone."""
    return boundary.seed_hops if isinstance(boundary, Halo) else 0


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


def check_seed_hops(boundary: Boundary, *, is_typed: bool = False, of_edges: bool = False) -> None:
    """Refuse seeds of other ranks where there are several types of nodes, or where seeds are edges."""
    if seed_hops(boundary) and (is_typed or of_edges):
        what = "graphs without types" if is_typed else "nodes as seeds, not for edges"
        raise ValueError(f"boundary={brief(boundary)} is for {what}: leave seed_hops out.")


def check_learns_apart(boundary: Boundary, trainer: Trainer | None) -> None:
    """Refuse seeds of other ranks where the gradients of all ranks' seeds are exchanged at every step."""
    if not seed_hops(boundary) or trainer is None or trainer.world_size == 1:
        return
    if not isinstance(trainer.strategy, TrainsReplicasApart):
        raise ValueError(
            f"boundary={brief(boundary)} lets ranks learn from each other's training nodes, as replicas drift apart. "
            f"With {type(trainer.strategy).__name__} they do not, and such nodes would count several times: leave "
            "seed_hops out, or use LocalSGDStrategy(), TMAStrategy() or LLCGStrategy()."
        )
