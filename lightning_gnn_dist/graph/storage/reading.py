"""Reads a saved graph."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.types import GraphTypes, arrays_below


class Rows(NamedTuple):
    """The edges and arrays of a saved graph, and its fingerprint."""

    indptr: Tensor
    indices: Tensor
    types: GraphTypes
    fingerprint: str


def read_graph(path: Path, num_senders: int | None = None) -> Rows:
    """Map a saved graph.

    Args:
        path: The directory.
        num_senders: The senders of edges lie below this. Default: the number of nodes.
    """
    inode = path.stat().st_ino if path.exists() else None
    rows = _read(path, num_senders)
    if path.stat().st_ino != inode:  # it was replaced while it was read: what was read may be of both
        return _read(path, num_senders)
    return rows


def _read(path: Path, num_senders: int | None) -> Rows:
    arrays, fingerprint, types = store.read(path, num_senders)
    if missing := {"indptr", "indices"} - arrays.keys():
        raise ValueError(f"{path} holds no {min(missing)}.npy that its meta.json knows of: save the graph again.")
    indptr, indices = arrays["indptr"], arrays["indices"]
    if types is None:
        nodes, edges = arrays_below("nodes/", arrays), arrays_below("edges/", arrays)
        convert.check_names(nodes, edges, allowed=("n_id",))
        types = GraphTypes.of_one(indptr, indices, nodes, edges, num_senders)
    return Rows(indptr, indices, types, fingerprint)
