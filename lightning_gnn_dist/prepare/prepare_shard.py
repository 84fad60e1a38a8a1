"""Makes a host's own shard of the files of a graph: no host ever has, or writes, the rest of it.

edge files, read by every host -> edges into own nodes -> sorted on disk -> shard
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_at_least,
    check_below,
    check_callable,
    check_file,
    check_folder,
    check_path,
    check_words,
)
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import append, cut_back, write_header
from lightning_gnn_dist.prepare.external_sort import ExternalSort
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles, Piece
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.numbering import Numbering
from lightning_gnn_dist.prepare.prepare_graph import (
    DEFAULT_MEMORY,
    MAX_BYTES_AT_ONCE,
    Estimate,
    OnProgress,
    Preparation,
    Prepared,
)
from lightning_gnn_dist.prepare.shard import INDEX, Bounds, shard_name, write_index

_SECONDS_PER_EDGE = 60e-9  # to read an edge of another shard; measured on one core: benchmarks/scale.md


def prepare_shard(
    source: str | Path,
    folder: str | Path,
    index: int,
    num_shards: int,
    *,
    assignment: str | Path | None = None,
    nodes: str | Path | None = None,
    undirected: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    float_labels: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
    on_progress: OnProgress = lambda stage, share: None,
) -> None:
    """Write one shard of a graph from its files, in bounded memory. The same call goes on after a kill.

    The shard is the one that :func:`save_shards` writes of the graph that :func:`prepare_graph` makes, to the bit. Each
    host reads all edges twice and keeps those into its own nodes. All hosts must be given the same files and settings;
    if not, ranks refuse to connect. Arguments that are not listed are those of :func:`prepare_graph`.

    Args:
        source: As for :func:`prepare_graph`, in files that this host can read. Arrays of edges must be dropped.
        folder: The directory of the shards, of which this host gets ``shares.json`` and its own shard.
        index: The number of the shard to write, from 0.
        num_shards: How many shards there are in all.
        assignment: A ``.npy`` with the shard of each node. Default: consecutive nodes, equally many in each shard.
        nodes: A table of all nodes in Parquet, as for :func:`prepare_graph`; each host first unpacks it.
        memory_bytes: Bytes that sorting and copying may take, beside labels and masks of all nodes, 8 bytes for each
            own node, and with an assignment 8 to 12 bytes for every node.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    check_at_least(1, num_shards=num_shards)
    check_below(num_shards, "shards", index=index)
    shard = ShardPreparation(
        check_path("source", source),
        check_folder("folder", folder) / shard_name(index),
        undirected,
        split,
        seed,
        tuple(drop),
        float_labels,
        memory_bytes,
        nodes=None if nodes is None else check_path("nodes", nodes),
        index=int(index),
        num_shards=int(num_shards),
        assignment=None if assignment is None else check_file("assignment", assignment),
    )
    shard.run(on_progress)


def of_one_shard(whole: Estimate, num_shards: int) -> Estimate:
    """Estimate one of so many shards of a graph, as if all were of one size."""
    return Estimate(
        num_edges=whole.num_edges,
        disk_bytes=whole.disk_bytes // num_shards,
        stored_bytes=whole.stored_bytes // num_shards,
        seconds=whole.seconds / num_shards + _SECONDS_PER_EDGE * whole.num_edges,
        headings=whole.headings,
    )


@dataclass(frozen=True, kw_only=True)
class OwnEdges(EdgeFiles):
    """The edges of a list into nodes of one part. Receivers are numbered in the part, senders as in the files.

    Args:
        numbering: The part of each node.
        part: The part whose edges to take.
        both_ways: Whether the reverse of every edge counts, too.
        told: Two hashes that are updated with all senders and all receivers, or empty.
    """

    numbering: Numbering
    part: int
    both_ways: bool
    told: tuple[Any, ...] = ()

    def pieces(self, edges_at_once: int, *, skip: int = 0) -> Iterator[Piece]:
        for piece in super().pieces(max(1, edges_at_once // 3), skip=skip):
            _check_ids(piece, int(self.numbering.bounds[-1]))
            for digest, ends in zip(self.told, piece[:2], strict=False):
                digest.update(ends.data)
            ways = [piece[:2], piece[1::-1]] if self.both_ways else [piece[:2]]
            found = [(sender[at], row) for sender, (at, row) in ((s, self._rows(r)) for s, r in ways)]
            senders, rows = (np.concatenate(ends) for ends in zip(*found, strict=True))
            yield Piece(senders, rows.astype(senders.dtype, copy=False), piece.file)

    def _rows(self, receivers: Any) -> tuple[Any, Any]:
        return self.numbering.rows(self.part, receivers)


@dataclass(frozen=True)
class ShardPreparation(Preparation):
    """The settings of :func:`prepare_shard`."""

    index: int = 0
    num_shards: int = 1
    assignment: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, num_shards=self.num_shards)
        check_at_least(0, index=self.index)
        if self.index >= self.num_shards:
            raise ValueError(f"{self.num_shards} shards are numbered from 0, so there is no shard {self.index}.")

    def estimate(self) -> Estimate:
        own = of_one_shard(super().estimate(), self.num_shards)
        return replace(own, disk_bytes=own.disk_bytes + self._column_bytes(self._num_nodes))  # of all nodes

    def run(self, on_progress: OnProgress) -> Prepared:
        own = self._numbering.bounds.tolist()
        check_division(self.out.parent, self.num_shards, lambda there: there.nodes.tolist() == own)
        return super().run(on_progress)

    def _write(self, journal: Journal, on_progress: OnProgress) -> Prepared:
        files = self._source_files
        if found := [*files.carried.arrays, *files.edges.carried]:
            name = found[0]
            raise ValueError(
                f"{name} belongs to edges, which shards made on their own hosts cannot carry: leave it out (--drop "
                f"{name}), or prepare the whole graph and divide it."
            )
        if not self._draft.exists():
            journal.clear()
        files = self._unpacked(files, journal, lambda share: on_progress("reading columns", share))
        (self._draft / "nodes").mkdir(parents=True, exist_ok=True)
        sort = self._sort(files, journal, on_progress)
        arrays = self._write_arrays(files, self._num_nodes, journal, lambda share: on_progress("copying arrays", share))
        sort.deal(lambda share: on_progress("dealing own edges into buckets", share))
        sort.sort(lambda share: on_progress("sorting buckets", share))
        sort.finish()
        names = [f"nodes/{name}" for name in arrays]
        prepared = self._describe(names, lambda share: on_progress("taking the fingerprint", share))
        self._write_index(journal.get("digest"))
        return prepared

    def _sort(self, files: GraphFiles, journal: Journal, on_progress: OnProgress) -> ExternalSort:
        """Count the own edges, and hash all edges, which identifies the graph. Returns the sort of the own edges."""
        every = files.edges
        edges = OwnEdges(
            files=every.files,
            num_edges=every.num_edges * (1 + self.undirected) // self.num_shards,
            numbering=self._numbering,
            part=self.index,
            both_ways=self.undirected,
        )
        sort = ExternalSort(
            edges,
            Carried({}),
            journal,
            self._draft,
            both_ways=False,
            memory_bytes=self.memory_bytes,
            once=self.undirected,
            num_senders=self._num_nodes,
            number=self._numbering.number,
        )
        if journal.get("digest") is None:
            journal.forget("num_nodes")
            told = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
            counting = replace(sort, edges=replace(edges, told=told))
            counting.count(self._own.size, lambda share: on_progress("counting own edges", share))
            journal.record(digest=self._digest(files, [digest.hexdigest() for digest in told]))
        return sort

    def _small_arrays(self, files: GraphFiles, num_nodes: int) -> dict[str, Tensor]:
        own = torch.from_numpy(self._own)
        small = {name: array[own] for name, array in self._small_of_all(files, num_nodes).items()}
        return small if "n_id" in small else small | {"n_id": own}

    def _small_of_all(self, files: GraphFiles, num_nodes: int) -> dict[str, Tensor]:
        """Return the small arrays of all nodes, not of the own ones alone."""
        return super()._small_arrays(files, num_nodes)

    def _copy(self, name: str, rows: RowFiles, journal: Journal, progress: Progress) -> None:
        """Read all rows of an array, and write the own ones."""
        target, copied = self._draft / "nodes" / f"{name}.npy", journal.get("copied", {})
        done, total, own = copied.get(name, 0), rows.shape[0], self._own
        start = write_header(target, rows.files[0].dtype, (own.size, *rows.shape[1:]))
        cut_back(target, start + int(np.searchsorted(own, done)) * rows.bytes_per_row)
        for piece in rows.pieces(done, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
            first, last = np.searchsorted(own, [done, done + len(piece)])
            if name == "x":
                convert.check_finite(torch.from_numpy(piece), done)
            append(target, piece[own[first:last] - done])
            done += len(piece)
            progress(done / total)
            if journal.is_due() or done == total:
                journal.record([target], copied=copied | {name: done})

    def _digest(self, files: GraphFiles, edges: list[str]) -> str:
        """A hash of all that the shards of a graph must have in common."""
        digest = hashlib.blake2b(repr((edges, self._numbering.digest, self.undirected)).encode(), digest_size=16)
        tell_arrays(digest, self._small_of_all(files, self._num_nodes), files.arrays)
        return digest.hexdigest()

    def _write_index(self, fingerprint: str) -> None:
        write_new_index(self.out.parent, {"fingerprint": fingerprint, "nodes": self._numbering.bounds.tolist()})

    def _inputs(self) -> dict[str, Any]:
        return super()._inputs() | {"index": self.index, "num_shards": self.num_shards, "parts": self._numbering.digest}

    @cached_property
    def _source_files(self) -> GraphFiles:
        return self._files()

    @cached_property
    def _num_nodes(self) -> int:
        if self._source_files.num_nodes is None:
            raise ValueError(
                f"{self.source} does not say how many nodes there are, and the host of a shard must know before it "
                "reads: add num_nodes.npy, x or y."
            )
        return self._source_files.num_nodes

    @cached_property
    def _numbering(self) -> Numbering:
        if self.assignment is None:
            return Numbering.ranges(self._num_nodes, self.num_shards)
        return Numbering.read(self.assignment, self._num_nodes, self.num_shards)

    @cached_property
    def _own(self) -> Any:
        """The nodes of the shard, by their numbers in the files."""
        own = self._numbering.owned(self.index)
        if own.size == 0:
            raise ValueError(f"No node belongs to shard {self.index} of {self.num_shards}: every shard needs one.")
        return own


def check_division(folder: Path, num_shards: int, is_same: Callable[[Bounds], bool]) -> None:
    """Refuse a folder with shards of another division."""
    if (folder / INDEX).exists() and not is_same(there := Bounds.read(folder)):
        raise ValueError(
            f"{folder / INDEX} describes {there.num_shards} shards that are not these {num_shards}: choose another "
            "directory, or give the settings that the others were made with."
        )


def tell_arrays(digest: Any, small: Mapping[str, Tensor], others: Mapping[str, RowFiles]) -> None:
    """Update a hash with the content of small arrays, and with types and shapes of others."""
    for name, array in sorted(small.items()):
        digest.update(f"{name} {array.dtype}".encode())
        digest.update(array.contiguous().numpy().data)
    for name, rows in sorted(others.items()):
        digest.update(f"{name} {rows.files[0].dtype} {rows.shape}".encode())


def write_new_index(folder: Path, about: dict[str, Any]) -> None:
    """Write where each shard begins; refuse a folder with shards of another graph."""
    there = folder / INDEX
    if there.exists() and Bounds.read(folder).fingerprint != about["fingerprint"]:
        raise ValueError(
            f"{there} describes shards of other edges, labels or settings than these: choose another directory, "
            "or make all shards from the same files."
        )
    write_index(folder, about)


def _check_ids(piece: Piece, num_nodes: int) -> None:
    for ends in piece[:2]:
        if ends.size and not (int(ends.min()) >= 0 and int(ends.max()) < num_nodes):
            raise ValueError(
                f"{piece.file} names node {int(ends.min()) if int(ends.min()) < 0 else int(ends.max())}, but the graph "
                f"has {num_nodes} nodes: ids must lie in [0, {num_nodes})."
            )
