"""A saved graph: one directory of ``.npy`` files and a ``meta.json`` that describes them."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown, without_way_out
from lightning_gnn_dist.graph.storage import contents
from lightning_gnn_dist.graph.storage.files import (
    check_entries,
    exchange,
    flush,
    folder_beside,
    make_read_only,
    open_file,
    read_json,
    unused_name,
)
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save_for_good
from lightning_gnn_dist.graph.typed.types import below_edges, below_nodes

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.tables import Tables
    from lightning_gnn_dist.graph.typed.types import GraphTypes

SHARDS, SHARD = "shares.json", "share-"  # the file beside shards, and how the name of a shard begins
FORMAT = "lightning_gnn_dist graph"
VERSION, UNTYPED = 2, 1  # that of a graph without types is what older releases read
IDS = "ids"  # the folder beside a graph that has the users' ids of its nodes
CHANGES = "changes"  # that of what has changed since it was saved, which releases before have written
_WAY_OUT = "Copy or save the graph again."
# Linux's MAP_NORESERVE, which Python's mmap module does not name.
_NO_RESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"} else 0


def write(
    path: Path,
    arrays: Mapping[str, Tensor],
    fingerprint: str,
    *,
    overwrite: bool,
    types: Mapping[str, Any] | None = None,
    ids: Mapping[str, Column] = MappingProxyType({}),
) -> None:
    """Save arrays under a temporary name beside ``path``, then rename: a reader sees all of them or nothing.

    ``types`` is what :attr:`GraphTypes.about` says of a typed graph, and ``ids`` are the users' ids of nodes, by the
    names of their files.
    """
    check_target(path, overwrite=overwrite)
    check_names(arrays)
    with folder_beside(path) as draft:
        for name, some in ids.items():
            save_for_good(draft / IDS / f"{name}.npy", some)
        checksums = {name: save_for_good(draft / f"{name}.npy", as_numpy(tensor)) for name, tensor in arrays.items()}
        forms = {name: (t.dtype, t.shape) for name, t in arrays.items()}
        describe(draft, forms, fingerprint, checksums, types)
        replace(draft, path)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a link, or anything but a saved graph, or a saved graph without ``overwrite``."""
    if path.is_symlink():
        raise FileExistsError(f"{path} is a link, which a saved graph would replace: save to the folder it stands for.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another path, or pass overwrite=True.")
    if path.exists() and not (path / "meta.json").exists():
        raise FileExistsError(f"{path} exists and is not a saved graph, so it is not overwritten. Choose another path.")


def read(path: Path, num_senders: int | None = None) -> tuple[dict[str, Tensor], str, GraphTypes | None]:
    """Map every array, and return them by name with the fingerprint, and the types of a typed graph.

    Edges are checked, unless a mark says that they were.

    Args:
        path: The directory.
        num_senders: The senders of edges must lie below this. Default: the number of rows.
    """
    meta = read_meta(path)
    if num_senders is None and path.name.startswith(SHARD) and (path.parent / SHARDS).exists():
        raise ValueError(
            f"{path} is one shard of a graph, and edges lead into it from others: train on all of {path.parent} with "
            "PartitionedDataModule, or where edges were split with LinkDataModule."
        )
    entries: dict[str, dict[str, Any]] = meta["arrays"]
    arrays = {name: _map_array(path / f"{name}.npy", entry) for name, entry in entries.items()}
    types = _types(path, meta, arrays)
    # Arrays of links are checked when links are opened.
    short = [name for name, entry in entries.items() if len(entry["shape"]) == 1 and not name.startswith("links/")]
    sign = contents.signature(path, ["meta.json", *(f"{name}.npy" for name in short)], num_senders=num_senders)
    if {"indptr", "indices"} <= entries.keys() and not contents.is_marked(path, sign):
        contents.check_edges(path, short, _checksums(entries), num_senders)
        if types is not None:
            types.check_edges(arrays["indptr"], arrays["indices"])
        contents.mark(path, sign)
    return arrays, meta["fingerprint"], types


def _types(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> GraphTypes | None:
    if meta["version"] == UNTYPED:
        return None
    try:
        return types_from(meta["types"], arrays)
    except (ValueError, TypeError) as error:
        said = without_way_out(error)
        raise ValueError(f"{path / 'meta.json'} does not fit the arrays beside it ({said}). {_WAY_OUT}") from error


def types_from(about: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> GraphTypes:
    """Make the types of a saved graph from what ``meta.json`` says and the arrays by the names of their files."""
    from lightning_gnn_dist.graph.typed.tables import Tables  # a graph without types needs none of it
    from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of

    sizes, of_edges = _sizes(about["nodes"], 1), _sizes(about["edges"], 3)
    edges = {(source, name, target): count for (source, name, target), count in of_edges}
    found = arrays.get("edge_type", torch.zeros(1, dtype=torch.uint8).expand(max(sum(edges.values()), 0)))
    types = GraphTypes(
        tuple(name for (name,), _ in sizes),
        offsets_of([count for _, count in sizes]),
        tuple(edges),
        tuple(edges.values()),
        found,
        {name: arrays_below(below_nodes(name), arrays) for (name,), _ in sizes},
        {edge_type: arrays_below(below_edges(edge_type), arrays) for edge_type in edges},
        about["time"],
        sender_offsets=tuple(about["senders"]) if "senders" in about else None,
        tables=Tables.saved(about["tables"]) if "tables" in about else None,
    )
    known = {"indptr", "indices", *types.arrays}
    if stray := [name for name in arrays if name not in known and not name.startswith("links/")]:
        raise ValueError(f"{shown(stray)} belong to no type.")
    return types


def _sizes(rows: Sequence[Sequence[Any]], num_words: int) -> list[tuple[tuple[str, ...], int]]:
    """The words of types, and how many nodes or edges there are of each, as ``meta.json`` has them."""
    for row in rows:
        *words, count = row or [None]
        if len(words) != num_words or not all(isinstance(word, str) for word in words) or type(count) is not int:
            raise ValueError(f"of each type it must give the name and how many there are, got {shown(list(row))}.")
    if len(twice := {tuple(row[:-1]) for row in rows}) < len(rows):
        raise ValueError(f"it names {len(rows)} types, of which only {len(twice)} differ.")
    return [(tuple(row[:-1]), row[-1]) for row in rows]


def arrays_below(folder: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays whose names begin with a folder, by the rest of their names."""
    return {name.removeprefix(folder): array for name, array in arrays.items() if name.startswith(folder)}


def verify(path: Path, prefix: str = "") -> list[str]:
    """Compare arrays whose names begin with ``prefix`` with their checksums; return the names of those without one."""
    entries = read_meta(path)["arrays"]
    checksums = _checksums({name: entry for name, entry in entries.items() if name.startswith(prefix)})
    contents.verify(path, checksums)
    return [name for name, checksum in checksums.items() if checksum is None]


def _checksums(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    return {name: entry.get("xxh64") for name, entry in entries.items()}


def describe(
    directory: Path,
    arrays: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    fingerprint: str,
    checksums: Mapping[str, str],
    types: Mapping[str, Any] | None = None,
) -> None:
    """Write ``meta.json``, which makes a directory of arrays a saved graph."""
    check_names(arrays)
    entries = {
        name: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "xxh64": checksums[name]}
        for name, (dtype, shape) in arrays.items()
    }
    meta = {"format": FORMAT, "version": UNTYPED, "fingerprint": fingerprint, "arrays": entries}
    if types is not None:
        meta |= {"version": VERSION, "types": types}
    (directory / "meta.json").write_text(json.dumps(meta, indent=1))
    flush(directory / "meta.json")


def replace(draft: Path, path: Path) -> None:
    """Put ``draft`` in the place of ``path``, and make its files read-only: a file that is mapped must never change.

    Where both are there they change names at once, if the system can do so; otherwise the old one is moved aside
    first. It is removed last. Processes that have mapped its files keep them.
    """
    make_read_only(draft)
    if not path.exists():
        os.rename(draft, path)
        return
    old = draft
    if not exchange(draft, path):
        old = unused_name(path)
        os.rename(path, old)
        os.rename(draft, path)
    shutil.rmtree(old)


def holds_split(path: Path) -> bool:
    """Whether a saved graph has held edges beside it."""
    return "links/undirected" in read_meta(path)["arrays"]


def holds_shards(path: Path) -> bool:
    """Whether a folder holds shards of a graph."""
    return (path / SHARDS).exists()


def read_meta(path: Path) -> dict[str, Any]:
    """The content of ``meta.json``; refuse it if an entry is missing or wrong."""
    file = path / "meta.json"
    if not file.exists():
        if holds_shards(path):
            raise FileNotFoundError(
                f"{path} is not a saved graph: it holds shards of one. Train on them with PartitionedDataModule, or "
                "where edges were split with LinkDataModule, or name the graph that was divided."
            )
        lacks = "it has no meta.json" if path.exists() else "there is no such folder"
        raise FileNotFoundError(
            f"{path} is not a saved graph: {lacks}. Write one with graph.save(path), or of tables and other files with "
            "lightning-gnn-dist prepare."
        )
    meta = read_json(file, _WAY_OUT)
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path} is not a graph saved by this package: its meta.json does not say {FORMAT!r}.")
    check_entries(meta, {"version": int, "fingerprint": str, "arrays": dict[str, dict[str, object]]}, file, _WAY_OUT)
    if meta["version"] < 1:
        raise ValueError(f"{file} is damaged (there is no format version {meta['version']}). {_WAY_OUT}")
    if meta["version"] > VERSION:
        raise ValueError(
            f"{path} was saved in format version {meta['version']}, and this release reads up to {VERSION}: "
            "upgrade lightning_gnn_dist, or save the graph again with this release."
        )
    if meta["version"] > UNTYPED:
        check_entries(meta, {"types": dict[str, object]}, file, _WAY_OUT)
        kinds = {"nodes": list[list[str | int]], "edges": list[list[str | int]], "time": str | None}
        check_entries({"senders": []} | meta["types"], kinds | {"senders": list[int]}, file, _WAY_OUT)
    _check_arrays(meta["arrays"], file)
    check_unchanged(path)
    return meta


def tables_at(path: Path) -> Tables | None:
    """Return what became of the tables of a database in a saved graph or its shards; None if it is of other files."""
    from lightning_gnn_dist.graph.typed.tables import Tables

    files = sorted([*path.glob("meta.json"), *path.glob(f"{SHARD}*/meta.json")])
    about = read_meta(files[0].parent).get("types", {}) if files else {}
    return Tables.saved(about["tables"]) if "tables" in about else None


def _check_arrays(entries: Mapping[str, dict[str, Any]], file: Path) -> None:
    """Refuse what a file says of arrays, if an entry is missing or wrong."""
    check_names(entries)
    for entry in entries.values():
        check_entries(entry, {"dtype": str, "shape": list[int]}, file, _WAY_OUT)
        check_entries({"xxh64": None} | entry, {"xxh64": str | None}, file, _WAY_OUT)
        if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
            raise ValueError(f"{file} is damaged (torch has no type {entry['dtype']!r:.60}). {_WAY_OUT}")


def check_unchanged(path: Path) -> None:
    """Refuse a saved graph beside which releases before have written changes: without them it is another graph."""
    if (path / CHANGES).exists():
        raise ValueError(
            f"{path / CHANGES} holds changes of a saved graph, which this release does not read: write them into one "
            f"with release 0.1.x (lightning-gnn-dist prepare {path} {path} --overwrite), or save the changed data "
            "anew, by lightning-gnn-dist prepare or Graph.from_pyg(data).save(path)."
        )


def check_names(names: Iterable[str]) -> None:
    """Refuse names that, as names of files, could lead out of the directory."""
    for name in names:
        if not re.fullmatch(r"indptr|indices|edge_type|(nodes|edges|links)(/\w[^/\\\0]*){1,2}", name):
            raise ValueError(
                f"{name.partition('/')[2] or name!r} cannot be the name of a saved array: start it with a letter, and "
                "use no slashes."
            )


def _map_array(file: Path, entry: dict[str, Any]) -> Tensor:
    """Map a file that holds what its entry in ``meta.json`` says."""
    dtype = getattr(torch, entry["dtype"])
    try:
        tensor = torch.from_numpy(map_npy(file))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise MemoryError(
                f"{file} cannot be mapped: its {file.stat().st_size:,} bytes are more than this process may still map "
                f"({_limits()}). Maps count in full although they hold no memory: raise that limit, or limit what is "
                "held instead (a cgroup, SLURM's --mem)."
            ) from error
        raise ValueError(f"{file} cannot be used ({str(error).rstrip('. ')}). {_WAY_OUT}") from error
    if dtype == torch.bfloat16:  # numpy has no bfloat16: its bits are stored as int16
        tensor = tensor.view(torch.bfloat16)
    if list(tensor.shape) != entry["shape"] or tensor.dtype != dtype:
        raise ValueError(
            f"{file} holds {tensor.dtype} {tuple(tensor.shape)}, but meta.json says {dtype} "
            f"{tuple(entry['shape'])}: the directory mixes two graphs. Save the graph again."
        )
    return tensor


def shard_name(index: int) -> str:
    """The name of a shard's directory."""
    return f"{SHARD}{index:05d}"


def _limits() -> str:
    """The limits on this process's maps, in words. Each counts the whole of a map that may be written to."""
    limits = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
    soft = {name: resource.getrlimit(kind)[0] for name, kind in limits.items()}
    found = [f"{name}: {limit:,} bytes" for name, limit in soft.items() if limit != resource.RLIM_INFINITY]
    return " and ".join(found) or "the system allows no more: vm.max_map_count, vm.overcommit_memory"


def map_npy(file: Path) -> np.ndarray[Any, Any]:
    """Map a file, copy on write: torch wants writable memory, and the file must never change.

    Not by ``np.load(mmap_mode="c")``: Linux refuses such a map when it is larger than RAM, unless told that it need
    not reserve memory for it.
    """
    found = NpyFile.of(file)
    if found.by_column:
        raise ValueError("it is stored by column, and rows are needed: numpy.ascontiguousarray(array)")
    found.type  # noqa: B018  refused here if torch has no such type
    count = math.prod(found.shape)
    if count == 0:
        return np.empty(found.shape, found.dtype)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with open_file(file) as stream:
        whole = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=protection)
    return np.frombuffer(whole, found.dtype, count, found.offset).reshape(found.shape)


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The numbers as they are saved: NumPy has no bfloat16, of which the bits are."""
    tensor = tensor.contiguous().resolve_conj().resolve_neg()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
