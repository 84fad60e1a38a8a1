"""Partitions on disk: computed once for a graph, then read by every rank and every run."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gnn_dist.checks import check_folder, check_instance
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.files import folder_beside, make_read_only, read_json
from lightning_gnn_dist.graph.storage.npy import NpyFile, save_for_good
from lightning_gnn_dist.graph.storage.store import replace
from lightning_gnn_dist.partition.base import Partition, Partitioner, check_request
from lightning_gnn_dist.partition.kernels import Array

log = logging.getLogger(__name__)

VERSION = 1  # raise it when the files change, or what a partitioner returns for the same settings


def cached_partition(
    graph: Graph, partitioner: Partitioner, num_parts: int, seed: int, cache_dir: str | Path | None = None
) -> Partition:
    """``partitioner(graph, num_parts, seed)``, read from the cache if it was computed before.

    An entry is found by everything that decides the result: the graph's fingerprint, the partitioner with
    its settings, ``num_parts`` and ``seed``. Processes may ask for the same entry at the same time, also on
    several hosts that share the directory: each computes it, the first to finish stores it, and all return
    what was stored. An entry that cannot be read is computed again and replaced.

    Args:
        graph: The graph to partition.
        partitioner: A frozen dataclass whose fields are plain values, so that they identify it.
        num_parts: How many parts.
        seed: Decides everything random in the partitioner.
        cache_dir: Where entries are kept. Default: ``partitions`` in the directory of a saved graph, if one
            can write there, and ``lightning_gnn_dist/partitions`` in the user's cache directory otherwise.
    """
    check_request(graph, num_parts, seed)
    directory = _default_directory(graph) if cache_dir is None else check_folder("cache_dir", cache_dir)
    key = {
        "version": VERSION,
        "graph": graph.fingerprint,
        "partitioner": identity(partitioner),
        "num_parts": int(num_parts),  # JSON knows no numpy integers
        "seed": int(seed),
    }
    entry = directory / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    if (partition := _read(entry, key, graph.num_nodes)) is not None:
        log.info("Read the partition into %d parts by %r from %s", num_parts, partitioner, entry)
        return partition
    _prepare(directory)
    return _store(_compute(graph, partitioner, num_parts, seed), entry, key)


def identity(value: object) -> str:
    """A text that identifies a partitioner in every process: its class and all of its fields."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(identity, value))})"
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(
            "A cached partitioner must be a frozen dataclass whose fields are numbers, strings, None, tuples "
            "or such dataclasses, because they identify its results in the cache; got "
            f"{value!r} of type {kind.__qualname__}. Decorate the class with @dataclass(frozen=True), or "
            "call the partitioner yourself and pass on the Partition."
        )
    fields = (f"{field.name}={identity(getattr(value, field.name))}" for field in dataclasses.fields(kind))
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(fields)})"


def _default_directory(graph: Graph) -> Path:
    if graph.path is not None:
        beside = graph.path / "partitions"
        if os.access(beside if beside.exists() else graph.path, os.W_OK):
            return beside
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lightning_gnn_dist" / "partitions"


def _prepare(directory: Path) -> None:
    """Refuse a directory one cannot write to before the work is done, not after."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError("one cannot write there")
    except OSError as error:
        raise PermissionError(
            f"Partitions cannot be kept in {directory} ({error.strerror or error}): choose another folder, as in "
            'PartitionedDataModule(..., holding=Holding(cache_dir="partitions")), or set XDG_CACHE_HOME.'
        ) from error


def _compute(graph: Graph, partitioner: Partitioner, num_parts: int, seed: int) -> Partition:
    started = time.monotonic()
    partition = partitioner(graph, num_parts, seed)
    seconds = time.monotonic() - started
    check_instance(f"What {partitioner!r} returns", partition, Partition, "a Partition")
    if partition.num_parts != num_parts:
        raise ValueError(f"{partitioner!r} returned {partition.num_parts} parts, and was asked for {num_parts}.")
    told = graph.num_nodes, num_parts, partitioner, seconds, 100 * partition.report(graph).cut_ratio
    log.info("Partitioned %d nodes into %d parts by %r in %.1f seconds: %.1f%% of the edges are cut", *told)
    return partition


def _store(partition: Partition, entry: Path, key: dict[str, Any]) -> Partition:
    """Write an entry under a temporary name, then rename it, so that nobody reads half of it."""
    assignment = partition.assignment.numpy()
    with folder_beside(entry) as draft:
        save_for_good(draft / "assignment.npy", assignment)
        (draft / "meta.json").write_text(json.dumps({**key, "digest": _digest(assignment)}, indent=1))
        make_read_only(draft)
        try:
            os.rename(draft, entry)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Another process was faster. All ranks must hold the same partition, so take what it stored.
            if (stored := _read(entry, key, assignment.size)) is not None:
                return stored
            replace(draft, entry)
    return partition


def _read(entry: Path, key: dict[str, Any], num_nodes: int) -> Partition | None:
    """The stored partition, or ``None`` if there is none or it is damaged."""
    if not entry.exists():
        return None
    try:
        meta = read_json(entry / "meta.json", "")
        file = NpyFile.of(entry / "assignment.npy")
        assignment = file.read(0, math.prod(file.shape)).reshape(file.shape)
    except (OSError, ValueError) as error:
        log.warning("The partition in %s cannot be read (%s): it is computed again", entry, str(error).rstrip(". "))
        return None
    intact = {**key, "digest": _digest(assignment)} == meta and assignment.shape == (num_nodes,)
    if not intact:
        log.warning("The partition in %s is damaged: it is computed again", entry)
        return None
    return Partition(torch.from_numpy(assignment), key["num_parts"])


def _digest(assignment: Array) -> str:
    digest = hashlib.blake2b(f"{assignment.dtype}{assignment.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(assignment).data)
    return digest.hexdigest()
