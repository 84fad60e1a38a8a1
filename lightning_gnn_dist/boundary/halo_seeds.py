"""Training nodes of a halo as seeds of the rank that holds it: ``Halo(seed_hops=...)``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.reach import Neighbourhoods


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
