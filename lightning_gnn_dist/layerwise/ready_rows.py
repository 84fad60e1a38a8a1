"""Rows of a module's last layer that were computed before the batch came."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.seed_batch import SeedBatch
from lightning_gnn_dist.layerwise.layers import HasLayers


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ready_rows(module: HasLayers, batch: Data) -> Tensor | None:
    """The rows of the batch's seeds, or None where they are still to be computed."""
    if not isinstance(batch, SeedBatch):
        return None
    rows = batch.rows_of(module)
    if rows is None:
        batch.read()
    return rows
