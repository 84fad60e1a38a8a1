"""Reads a saved graph with the changes in its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.changing import log
from lightning_gnn_dist.graph.changing.change import Change
from lightning_gnn_dist.graph.changing.edges import Rows
from lightning_gnn_dist.graph.changing.nodes import room_in_ram
from lightning_gnn_dist.graph.changing.rows import changed
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.room import map_with_room
from lightning_gnn_dist.graph.typed.types import GraphTypes, arrays_below


class Saved(NamedTuple):
    """A graph as it was read.

    Attributes:
        rows: Its edges and arrays.
        fingerprint: As it was saved; None where it has changed since.
        base: The version that was saved whole; the log has those behind it.
    """

    rows: Rows
    fingerprint: str | None
    base: int


def read_graph(
    path: Path, num_senders: int | None = None, version: int | None = None, more: Sequence[Change] = ()
) -> Saved:
    """Map a saved graph, and merge the changes in its log.

    Node arrays stay mapped: rows that come or change take memory alone. Of edges, arrays into which rows come between
    others are copied into RAM: ``indices``, the number of their type, and what those types carry that change.

    Args:
        path: The directory.
        num_senders: The senders of edges lie below this. Default: the number of nodes.
        version: The version to read. Default: the newest.
        more: Changes behind those in the log.
    """
    inode = path.stat().st_ino if path.exists() else None
    saved = _read(path, num_senders, version, more)
    if path.stat().st_ino != inode:  # it was replaced while it was read: what was read may be of both
        return _read(path, num_senders, version, more)
    return saved


def _read(path: Path, num_senders: int | None, version: int | None, more: Sequence[Change]) -> Saved:
    arrays, fingerprint, types = store.read(path, num_senders)
    if missing := {"indptr", "indices"} - arrays.keys():
        raise ValueError(f"{path} holds no {min(missing)}.npy that its meta.json knows of: save the graph again.")
    rows = arrays["indptr"], arrays["indices"]
    if types is None:
        nodes, edges = arrays_below("nodes/", arrays), arrays_below("edges/", arrays)
        convert.check_names(nodes, edges, allowed=("n_id",))
        types = GraphTypes.of_one(*rows, nodes, edges, num_senders)
    history = tuple(store.read_meta(path).get("history", ()))
    saved = Rows(*rows, replace(types, history=history) if history else types)
    changes = [*log.read(path, _number_of_changes(path, len(history), version)), *more]
    if not changes:
        return Saved(saved, fingerprint, len(history))
    if any(name.startswith("links/") for name in arrays):
        raise ValueError(f"{path} is a split of the edges of a graph: change the graph, and split it again.")

    def room(name: str, array: Tensor, count: int) -> Tensor:
        return map_with_room(path / f"{name}.npy", array, count) if name in arrays else room_in_ram(name, array, count)

    return Saved(changed(saved, changes, room), None, len(history))


def _number_of_changes(path: Path, base: int, version: int | None) -> int:
    """How many changes of the log lead to a version."""
    newest = base + log.num_changes(path)
    if version is None:
        return newest - base
    if not base <= version <= newest:
        raise ValueError(
            f"version must lie between {base} and {newest}, got {version}: {path} has no others, as those before were "
            "written into one."
        )
    return version - base
