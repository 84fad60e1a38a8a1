"""Ids of nodes in increasing order: as a range, which takes no memory, as a tensor, or in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.rows import degrees_of, starts_of
from lightning_gnn_dist.graph.storage.store import map_npy

Ids = Tensor | range


def ids_of(nodes: Ids) -> Tensor:
    """Return the ids as a tensor."""
    return torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes


def kept(ids: Tensor, most_bytes: int, folder: Path | None) -> Tensor:
    """Return the same ids, in a file if they take more bytes: then the system may take back their memory."""
    if ids.nbytes <= most_bytes:
        return ids
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        np.save(Path(draft) / "ids.npy", ids.numpy())
        return torch.from_numpy(map_npy(Path(draft) / "ids.npy"))


def edges_before(indptr: Tensor, rows: Ids) -> Tensor:
    """Return how many edges the rows before each of some have, and all of them at the end, but for a constant."""
    if isinstance(rows, range):
        return indptr[rows.start : rows.stop + 1]
    return starts_of(degrees_of(indptr, rows))
