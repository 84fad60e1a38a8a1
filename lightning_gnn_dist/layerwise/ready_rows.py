"""Rows of a module's last layer that were computed before the batch came."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.layerwise.layers import HasLayers


def ready_rows(module: HasLayers, batch: Data) -> Tensor | None:
    """The rows of the batch's seeds, or None where they are still to be computed."""
    return None
