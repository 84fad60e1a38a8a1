"""The log of changes beside a saved graph: a folder for each of them, which appears when it is complete.

    my_graph/changes/000001/meta.json, nodes/x.npy, edges/edge_index.npy, ...

Each says which one it follows, by a hash of that one's ``meta.json``, the first by that of the graph's: so a change is
read where it belongs or not at all. All of its files are compared with their checksums whenever a graph is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from lightning_gnn_dist.graph.changing.change import Change, Kind
from lightning_gnn_dist.graph.storage import contents, store
from lightning_gnn_dist.graph.storage.files import (
    check_entries,
    flush,
    folder_beside,
    locked,
    make_read_only,
    read_json,
    remove_left_behind,
)
from lightning_gnn_dist.graph.storage.mapped_ids import MappedIds
from lightning_gnn_dist.graph.typed.names import EdgeType, below_edges, below_nodes
from lightning_gnn_dist.graph.typed.types import arrays_below

FORMAT, VERSION = "lightning_gnn_dist change", 1
_PARTITIONS, _META = "partitions", "meta.json"
_WAY_OUT = "Copy the folder again, with all that is in it."


def num_changes(path: Path) -> int:
    """How many changes lie beside a saved graph."""
    count = 0
    while _folder(path, count).exists():
        count += 1
    return count


def has_changes(path: Path) -> bool:
    """Whether a path is that of a saved graph with changes beside it."""
    return (path / _META).exists() and num_changes(path) > 0


def read(path: Path, count: int) -> list[Change]:
    """Read the first changes of the log of a saved graph, and refuse files that are not what was written."""
    found, follows = [], _digest(path)
    for number in range(count):
        folder = _folder(path, number)
        meta = _meta(folder)
        if meta["follows"] != follows:
            raise ValueError(f"{folder} is a change of another graph, or follows another change. {_WAY_OUT}")
        contents.verify(folder, {name: entry.get("xxh64") for name, entry in meta["arrays"].items()})
        contents.verify(folder, {f"{store.IDS}/{name}": checksum for name, checksum in meta.get("ids", {}).items()})
        arrays = {name: store.map_array(folder / f"{name}.npy", entry) for name, entry in meta["arrays"].items()}
        nodes = {kind: arrays_below(below_nodes(kind), arrays) for kind in meta["nodes"]}
        edge_types: list[EdgeType] = [(source, name, target) for source, name, target in meta["edges"]]
        edges = {kind: arrays_below(below_edges(kind), arrays) for kind in edge_types}
        found.append(Change(meta["kind"], nodes, edges, dict(meta["counts"])))
        follows = _digest(folder)
    return found


def check_as_opened(path: Path, base: int, fingerprint: str | None) -> None:
    """Refuse a saved graph in whose place another lies since it was opened, or its own log in one.

    Args:
        path: The directory.
        base: The version that was saved whole.
        fingerprint: That of the graph as it was saved; None where it has changed since.
    """
    meta = store.read_meta(path)
    if len(meta.get("history", ())) != base or fingerprint not in (None, meta["fingerprint"]):
        raise _has_changed(path)


def append(path: Path, number: int, change: Change) -> None:
    """Write a change behind ``number`` others, unless this very one is there: ranks may run one script.

    It is written beside the log and renamed. Nothing else may have been written since these were read.
    """
    with locked(path):
        folder = _folder(path, number)
        if num_changes(path) < number:  # they were written into one
            raise _has_changed(path)
        with folder_beside(folder) as draft:
            _write(draft, change, _digest(path if number == 0 else _folder(path, number - 1)))
            if folder.exists() and _digest(folder) == _digest(draft):
                return
            if folder.exists():
                raise _has_changed(path)
            make_read_only(draft)
            os.rename(draft, folder)
        flush(folder.parent)


def compact(
    path: Path,
    number: int,
    arrays: Mapping[str, Tensor],
    fingerprint: str,
    types: Mapping[str, Any] | None,
    history: Sequence[Mapping[str, int]],
    ids: Mapping[str, MappedIds],
) -> None:
    """Write a graph with ``number`` changes in the place of the one that it was read from, and of its log.

    Partitions stay, as they are those of the fingerprint.
    """
    with locked(path):
        if num_changes(path) != number:
            raise _has_changed(path)
        drafts = path.with_name(f"{path.name}.written_into_one")  # those of all who hold the lock, and of nobody else
        remove_left_behind(drafts)
        with folder_beside(drafts) as draft:
            store.write_into(draft, arrays, fingerprint, types, history, ids)
            if (path / _PARTITIONS).is_dir():
                shutil.copytree(path / _PARTITIONS, draft / _PARTITIONS)
            store.replace(draft, path)


def _write(draft: Path, change: Change, follows: str) -> None:
    arrays = {f"{below_nodes(kind)}{name}": a for kind, rows in change.nodes.items() for name, a in rows.items()}
    for edge_type, rows in change.edges.items():
        arrays |= {f"{below_edges(edge_type)}{name}": array for name, array in rows.items()}
    store.check_names(arrays)
    checksums = store.write_arrays(draft, arrays)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "kind": change.kind,
        "follows": follows,
        "counts": dict(change.counts),
        "nodes": [*change.nodes],
        "edges": [[*edge_type] for edge_type in change.edges],
        "arrays": store.entries_of({name: (a.dtype, a.shape) for name, a in arrays.items()}, checksums),
    }
    if change.ids:
        about["ids"] = store.write_ids(draft, {kind or "nodes": MappedIds([ids]) for kind, ids in change.ids.items()})
    (draft / _META).write_text(json.dumps(about, indent=1))
    flush(draft / _META)


def _meta(folder: Path) -> dict[str, Any]:
    file = folder / _META
    meta = read_json(file, _WAY_OUT)
    if meta.get("format") != FORMAT or meta.get("kind") not in get_args(Kind):
        raise ValueError(f"{folder} is not a change that this package wrote: remove it, or copy the graph again.")
    kinds: dict[str, Any] = {"version": int, "follows": str, "counts": dict[str, int], "nodes": list[str]}
    kinds |= {"edges": list[list[str]], "arrays": dict[str, dict[str, object]]}
    check_entries({"ids": {}} | meta, kinds | {"ids": dict[str, str]}, file, _WAY_OUT)
    if any("/" in name for name in meta.get("ids", {})):
        raise ValueError(f"{file} is damaged (a file of ids lies elsewhere). {_WAY_OUT}")
    if meta["version"] > VERSION:
        raise ValueError(f"{folder} was written by a later release: upgrade lightning_gnn_dist.")
    if any(len(edge_type) != 3 for edge_type in meta["edges"]):
        raise ValueError(f"{file} is damaged (an edge type has three words). {_WAY_OUT}")
    store.check_arrays(meta["arrays"], file)
    return meta


def _has_changed(path: Path) -> ValueError:
    return ValueError(
        f"{path} has changed since it was opened: open it again, Graph.open(path), and ask that for the change."
    )


def _folder(path: Path, number: int) -> Path:
    return path / store.CHANGES / f"{number + 1:06d}"


def _digest(folder: Path) -> str:
    return hashlib.blake2b((folder / _META).read_bytes(), digest_size=16).hexdigest()
