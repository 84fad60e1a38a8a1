"""Ids of nodes in increasing order: as a range, which takes no memory, as a tensor, or in a file."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
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


def by_type(ids: Ids, offsets: Sequence[int]) -> list[Ids]:
    """Divide increasing ids by the type of the node, which begin at these offsets."""
    if len(offsets) == 2:
        return [ids]
    cuts = [bisect_left(ids, offset) for offset in offsets] if isinstance(ids, range) else _cuts(ids, offsets)
    return [ids[start:stop] for start, stop in pairwise(cuts)]


def _cuts(ids: Tensor, offsets: Sequence[int]) -> list[int]:
    found: list[int] = torch.searchsorted(ids, torch.tensor(offsets)).tolist()
    return found
