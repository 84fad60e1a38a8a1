"""A small graph with types in parts of unequal sizes."""

from typing import Any

import torch

import lightning_gnn_dist as lgd
from tests.layers.typed_model import some_data

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
DATA, RANKS = some_data(), 3


def owners(graph: lgd.Graph, num_parts: int = RANKS) -> lgd.Partition:
    """Parts of unequal sizes; the last one has authors and venues alone, so nothing to learn."""
    owner = (torch.arange(graph.num_nodes) * 7 % 11 < 4).int()
    if num_parts > 2:
        for kind in ("author", "venue"):
            nodes = graph.types.nodes_of(kind)
            owner[nodes.start + 1 : nodes.stop : 3] = 2
    return lgd.Partition(owner, num_parts)


OPTIONS: dict[str, Any] = {"precision": "64-true", "limit_val_batches": 0}
