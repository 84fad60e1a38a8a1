"""Which shard of a graph a host makes for itself, of files that every host reads: no host has, or writes, the rest.

Every node belongs to a part, and has a new number, part after part, in each in order. Of all edges that are read those
into own nodes are written as arrays, which are then sorted. Beside the shard stands where each shard begins, and a hash
of what the shards of a graph must have in common.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import Count, check_below, check_fields, check_file, check_path, shown
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.rng import mix
from lightning_gnn_dist.extensions.shards.index import Bounds, TypedBounds, seeds_of
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.graph.typed.types import EDGE, EdgeType, GraphTypes
from lightning_gnn_dist.prepare.arrays import GrowingArrays, Progress, RowFiles
from lightning_gnn_dist.prepare.edges import EdgeSorting, OnProgress, edges_at_once
from lightning_gnn_dist.prepare.nodes import NodesOfType, Part
from lightning_gnn_dist.prepare.plan import EdgeFiles, Plan, edges_in, turn_two_edges, words_of
from lightning_gnn_dist.prepare.prepare_graph import Portion

NODES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPart(Part):
    """The nodes of one of several parts. Parts number nodes one part after the other.

    Attributes:
        starts: The first number of each part, then the number of nodes.
        index: Which part is prepared.
        assignment: The part of each node, or None if parts are ranges of nodes.
    """

    starts: Column
    index: int
    assignment: Column | None = None

    @classmethod
    def ranges(cls, num_nodes: int, num_parts: int, index: int) -> ShardPart:
        """One of parts of consecutive nodes, with equally many or one more in each."""
        sizes = np.full(num_parts, num_nodes // num_parts)
        sizes[: num_nodes % num_parts] += 1
        return cls(num_nodes, starts=np.concatenate([[0], sizes.cumsum()]), index=index)

    @classmethod
    def read(cls, file: Path, num_nodes: int, num_parts: int, index: int) -> ShardPart:
        """Read a ``.npy`` with the part of each node. Takes 8 to 12 bytes for every node of the graph."""
        found = NpyFile.of(file)
        if found.shape != (num_nodes,) or found.dtype.kind not in "iu":
            raise ValueError(
                f"{file} holds {found.dtype} of shape {found.shape}, and the part of each of {num_nodes:,} nodes is "
                "needed: whole numbers, one for every node."
            )
        assignment, counts = np.empty(num_nodes, np.int32), np.zeros(num_parts, np.int64)
        for first in range(0, num_nodes, NODES_AT_ONCE):
            piece = found.read(first, min(NODES_AT_ONCE, num_nodes - first))
            if not 0 <= int(piece.min()) <= int(piece.max()) < num_parts:
                raise ValueError(
                    f"{file} names parts beyond the {num_parts} shards that there are: parts must lie in "
                    f"[0, {num_parts})."
                )
            assignment[first : first + len(piece)] = piece
            counts += np.bincount(assignment[first : first + len(piece)], minlength=num_parts)
        starts = np.concatenate([[0], counts.cumsum()])
        return cls(num_nodes, _number(assignment, starts), starts=starts, index=index, assignment=assignment)

    @property
    def size(self) -> int:
        return int(self.starts[self.index + 1] - self.starts[self.index])

    @property
    def nodes(self) -> Column:
        """The nodes of the part, by their old numbers."""
        if self.assignment is None:
            return np.arange(self.starts[self.index], self.starts[self.index + 1])
        return np.flatnonzero(self.assignment == self.index)

    def rows(self, nodes: Column) -> tuple[Column, Column]:
        """The positions of the part's nodes in ``nodes``, and their numbers within the part, from 0."""
        first, end = self.starts[self.index : self.index + 2]
        is_own = (nodes >= first) & (nodes < end) if self.assignment is None else self.assignment[nodes] == self.index
        places = np.flatnonzero(is_own)
        return places, self.renumbered(nodes[places]) - first

    def count(self, nodes: Column) -> Column:
        """How many of ``nodes`` are of each part."""
        if self.assignment is None:
            parts = np.searchsorted(self.starts, nodes, side="right") - 1
        else:
            parts = self.assignment[nodes]
        return np.bincount(parts, minlength=len(self.starts) - 1)

    @property
    def digest(self) -> str:
        """A hash of the parts' sizes and of the assignment."""
        told = blake2b(self.starts.astype(np.int64).tobytes(), digest_size=16)
        if self.assignment is not None:
            told.update(self.assignment.data)
        return told.hexdigest()


def _number(assignment: Column, starts: Column) -> Column:
    """The new number of each node, computed in pieces."""
    dtype = np.int32 if assignment.size <= np.iinfo(np.int32).max else np.int64
    number = np.empty(assignment.size, dtype)
    free, num_parts = starts[:-1].copy(), len(starts) - 1
    for first in range(0, assignment.size, NODES_AT_ONCE):
        piece = assignment[first : first + NODES_AT_ONCE]
        order, counts = np.argsort(piece, kind="stable"), np.bincount(piece, minlength=num_parts)
        number[first + order] = np.arange(piece.size) + (free - (counts.cumsum() - counts)).repeat(counts)
        free += counts
    return number


@dataclass(frozen=True, kw_only=True)
class NodesOfShard(NodesOfType):
    """The nodes of one type in a shard. They carry their ids in ``n_id``."""

    part: ShardPart

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys([*super().names, "n_id"])]

    def own(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        own = torch.from_numpy(self.part.nodes)
        return {"n_id": own} | {name: array[own] for name, array in arrays.items()}

    def own_rows(self, name: str, rows: RowFiles, progress: Progress) -> Iterator[tuple[int, Column]]:
        for first, piece in self.pieces(name, rows):
            at, places = self.part.rows(np.arange(first, first + len(piece)))
            if places.size:
                yield int(places[0]), piece[at]
            progress((first + len(piece)) / max(rows.shape[0], 1))


@compiled
def add_edges(senders: Column, receivers: Column, sums: Column) -> None:
    """Add two hashes of every edge to ``sums``, two numbers of 64 bits, which do not depend on the edges' order."""
    for at in range(senders.size):
        mixed = mix(mix(np.uint64(senders[at])) ^ np.uint64(receivers[at]))
        sums[0] += mixed
        sums[1] += mix(mixed ^ np.uint64(0x9E3779B97F4A7C15))


@dataclass(frozen=True)
class ShardEdges(EdgeSorting):
    """Sorts the edges into the nodes of a shard."""

    adds_reverse: ClassVar[bool] = False  # what was gathered is both

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        super().sort(edge_type, as_read, parts, on_progress)
        shutil.rmtree(self._gathered(edge_type), ignore_errors=True)

    def files_of(self, edge_type: EdgeType, files: EdgeFiles, part: Part, on_progress: OnProgress) -> EdgeFiles:
        """Those into the nodes of the shard, written into arrays."""
        journal, folder = self.journal(edge_type), self._gathered(edge_type)
        assert isinstance(part, ShardPart)
        if not journal.get("is_gathered"):
            shutil.rmtree(folder, ignore_errors=True)
            progress = partial(on_progress, f"reading {words_of(edge_type)}")
            counts, digest = self._gather(files, part, folder, progress)
            journal.record(sorted(folder.iterdir()), is_gathered=True, counts=counts, digest=digest)
        return replace(edges_in(folder), num_senders=files.num_senders, num_receivers=part.size)

    def _gathered(self, edge_type: EdgeType) -> Path:
        return self.of_type(edge_type) / "gathered"

    def _gather(self, files: EdgeFiles, part: ShardPart, folder: Path, progress: Progress) -> tuple[list[int], str]:
        """Write the edges into own nodes; return how many lead into each part, as they are read, and a hash of all."""
        kind, rows_of = convert.index_dtype(max(files.num_senders or 0, files.num_receivers or 0)), files.carried.arrays
        dtype, arrays = torch.empty(0, dtype=kind).numpy().dtype, GrowingArrays(folder, folder)
        arrays.add({"edge_index": np.empty((0, 2), dtype)} | {name: rows.read(0, 0) for name, rows in rows_of.items()})
        counts, sums, seen = np.zeros(len(part.starts) - 1, np.int64), np.zeros(2, np.uint64), 0
        for sender, receiver, _ in files.pieces(edges_at_once(self.memory_bytes // 2, files.carried.bytes_per_edge)):
            carried = files.carried.rows(seen, sender.size)
            counts += part.count(receiver)
            add_edges(sender, receiver, sums)
            for senders, receivers in [(sender, receiver), (receiver, sender)][: 1 + self.undirected]:
                at, places = part.rows(receivers)
                ends = np.stack([senders[at], places], 1).astype(dtype)
                arrays.add({"edge_index": ends} | {name: array[at] for name, array in carried.items()})
            seen += sender.size
            progress(seen / max(files.num_edges, 1))
        arrays.finish()
        turn_two_edges(folder / "edge_index.npy")
        return counts.tolist(), sums.tobytes().hex()


@dataclass(frozen=True)
class OneShard(Portion):
    """The shard that :func:`prepare_graph` writes, of so many in all.

    Args:
        index: The number of the shard, from 0.
        num_shards: How many shards there are in all.
        assignment: A ``.npy`` with the shard of each node; of a graph with types a folder with a file for each node
            type, ``paper.npy``, with the shard of each of its nodes, in the order of their table. Default: consecutive
            nodes, of each type equally many in each shard.
    """

    index: int
    num_shards: Count
    assignment: str | Path | None = None
    is_whole: ClassVar[bool] = False
    sorting: ClassVar[type[EdgeSorting]] = ShardEdges
    of_nodes: ClassVar[type[NodesOfType]] = NodesOfShard

    def __post_init__(self) -> None:
        check_fields(self)
        check_below(self.num_shards, "shards", index=self.index)
        if self.assignment is not None:
            check_path("assignment", self.assignment)

    def target(self, out: Path) -> Path:
        return out / store.shard_name(self.index)

    @property
    def facts(self) -> dict[str, Any]:  # type: ignore[override]  # of all of a graph it is a constant
        path = Path(self.assignment or "")
        files = [] if self.assignment is None else sorted(path.glob("*.npy")) if path.is_dir() else [path]
        times = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {"index": int(self.index), "num_shards": int(self.num_shards), "assignment": times}

    def check_plan(self, plan: Plan) -> None:
        self._check_assignment(plan.nodes)
        of_tables = [name for table in plan.tables if EDGE in table.edges for name in table.columns]
        if not plan.have_names and (found := [*plan.edges[EDGE].carried.arrays, *of_tables]):
            raise ValueError(  # nobody who makes a shard would know their numbers among all edges
                f"{found[0]} belongs to edges, which shards made on their own hosts cannot carry: leave it out (--drop "
                f"{found[0]}), or prepare the whole graph and divide it."
            )

    def part(self, kind: str, num_nodes: int) -> ShardPart:
        if self.assignment is None:
            return ShardPart.ranges(num_nodes, self.num_shards, self.index)
        return ShardPart.read(
            Path(self.assignment, f"{kind}.npy" if kind else ""), num_nodes, self.num_shards, self.index
        )

    def count(self, source: Path, edges: EdgeSorting, on_progress: OnProgress) -> int:
        raise ValueError(
            f"{source} does not say how many nodes there are, and the host of a shard must know before it reads: add "
            "num_nodes.npy, x or y."
        )

    def check_nodes(self, out: Path, parts: Sequence[Any]) -> None:
        starts = np.sum([part.starts for part in parts], 0)
        there = Bounds.read(out) if store.holds_shards(out) else None
        if there is not None and there.nodes.tolist() != starts.tolist():
            raise ValueError(
                f"{out / store.SHARDS} describes {there.num_shards} shards that are not these {self.num_shards}: "
                "choose another directory, or give the settings that the others were made with."
            )
        if starts[self.index] == starts[self.index + 1]:
            raise ValueError(f"No node belongs to shard {self.index} of {self.num_shards}: every shard needs one.")

    def finish(
        self,
        out: Path,
        nodes: Mapping[str, NodesOfType],
        types: GraphTypes | None,
        edges: EdgeSorting,
        edge_types: Collection[EdgeType],
    ) -> None:
        """Write the index, or refuse one of shards of another graph."""
        journals = {each: edges.journal(each) for each in edge_types}
        starts = torch.stack([torch.from_numpy(_part_of(of_kind).starts) for of_kind in nodes.values()])
        told = {each: str(journal.get("digest")) for each, journal in journals.items()}
        digest = _digest(nodes, types, told, edges.undirected, edges.plan.time)
        bounds = TypedBounds.of_one(starts.sum(0), starts[0, :0])  # nobody counts the edges of all
        if types is not None:
            counts = torch.tensor([[0, *journal.get("counts")] for journal in journals.values()]).cumsum(1)
            bounds = TypedBounds(types.node_types, types.edge_types, starts, counts, seeds_of(types))
        if store.holds_shards(out) and Bounds.read(out).fingerprint != digest:
            raise ValueError(
                f"{out / store.SHARDS} describes shards of other edges, labels or settings than these: choose another "
                "directory, or make all shards from the same files."
            )
        Bounds(digest, bounds).write(out)

    def _check_assignment(self, kinds: Iterable[str]) -> None:
        """Refuse an assignment that does not fit the node types."""
        wanted = list(kinds)
        if self.assignment is None:
            return
        if wanted == [""]:
            check_file("assignment", self.assignment)
            return
        folder = Path(self.assignment)
        found = {file.stem for file in folder.glob("*.npy")} if folder.is_dir() else set()
        if found != set(wanted):
            wrong = sorted(set(wanted) - found) or sorted(found - set(wanted))
            raise ValueError(
                f"assignment ({folder}) must be a folder with one .npy for each node type ({shown(wanted)}), and "
                f"{'lacks' if set(wanted) - found else 'has'} {wrong[0]}.npy: give the shard of each node of a type."
            )


def _digest(
    nodes: Mapping[str, NodesOfType],
    types: GraphTypes | None,
    edges: Mapping[EdgeType, str],
    undirected: bool,
    time: str | None,
) -> str:
    if types is None:
        (of_all,), (told,) = nodes.values(), edges.values()
        digest = blake2b(repr((told, _part_of(of_all).digest, undirected)).encode(), digest_size=16)
        _tell(of_all, digest)
        return digest.hexdigest()
    of_nodes = []
    for kind, of_kind in nodes.items():
        digest = blake2b(repr(of_kind.files.num_nodes).encode(), digest_size=16)
        _tell(of_kind, digest)
        of_nodes.append((kind, _part_of(of_kind).digest, digest.hexdigest()))
    of_edges = [*edges.items()]
    arrays = [(name, str(array.dtype), list(array.shape[1:])) for name, array in sorted(types.arrays.items())]
    return blake2b(repr((of_nodes, of_edges, arrays, time)).encode(), digest_size=16).hexdigest()


def _part_of(nodes: NodesOfType) -> ShardPart:
    assert isinstance(nodes.part, ShardPart)
    return nodes.part


def _tell(nodes: NodesOfType, digest: Any) -> None:
    """Update a hash with the content of small arrays of all nodes, and with types and shapes of others."""
    for name, array in sorted(nodes.small.items()):
        digest.update(f"{name} {array.dtype}".encode())
        digest.update(array.contiguous().numpy().data)
    for name, rows in sorted(nodes.files.arrays.items()):
        digest.update(f"{name} {rows.files[0].dtype} {rows.shape}".encode())
