"""Makes a host's own shard of the tables and arrays of a graph with types: no host has, or writes, the rest of it.

tables, read by every host -> own nodes, and edges into them -> sorted on disk -> shard
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gnn_dist.checks import (
    check_at_least,
    check_below,
    check_callable,
    check_folder,
    check_path,
    check_words,
    shown,
)
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, offsets_of
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.numbering import Numbering, Part
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY, Estimate, OnProgress, Prepared
from lightning_gnn_dist.prepare.prepare_shard import (
    ShardPreparation,
    check_division,
    of_one_shard,
    tell_arrays,
    write_new_index,
)
from lightning_gnn_dist.prepare.prepare_typed import TypedPreparation
from lightning_gnn_dist.prepare.shard import shard_name
from lightning_gnn_dist.prepare.typed.estimate import estimate_of
from lightning_gnn_dist.prepare.typed.nodes import NodesOfType
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds, seeds_of


def prepare_typed_shard(
    source: str | Path,
    folder: str | Path,
    index: int,
    num_shards: int,
    *,
    assignment: str | Path | None = None,
    time: str | None = None,
    reverse: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    float_labels: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
    on_progress: OnProgress = lambda stage, share: None,
) -> None:
    """Write one shard of a graph with types from its tables, in bounded memory. The same call goes on after a kill.

    The shard is the one that :func:`save_shards` writes of the graph that :func:`prepare_typed_graph` makes, to the
    bit. Each host reads all tables and keeps its own nodes, the edges into them and what these carry. All hosts must be
    given the same files and settings; if not, ranks refuse to connect. Arguments that are not listed are those of
    :func:`prepare_typed_graph`.

    Args:
        source: As for :func:`prepare_typed_graph`, in files that this host can read.
        folder: The directory of the shards, of which this host gets ``shares.json`` and its own shard.
        index: The number of the shard to write, from 0.
        num_shards: How many shards there are in all.
        assignment: A folder with a file for each node type, ``paper.npy``, with the shard of each of its nodes, in the
            order of their table. Default: of each type consecutive nodes, equally many in each shard.
        memory_bytes: Bytes that reading, sorting and copying may take, beside labels, masks, times and ids of all
            nodes, 8 bytes for each own node, and with an assignment 8 to 12 bytes for every node.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    check_at_least(1, num_shards=num_shards)
    check_below(num_shards, "shards", index=index)
    shard = TypedShardPreparation(
        check_path("source", source),
        check_folder("folder", folder) / shard_name(index),
        split=split,
        seed=seed,
        drop=tuple(drop),
        float_labels=float_labels,
        memory_bytes=memory_bytes,
        time=time,
        reverse=reverse,
        index=int(index),
        num_shards=int(num_shards),
        assignment=None if assignment is None else check_path("assignment", assignment),
    )
    shard.run(on_progress)


@dataclass(frozen=True, kw_only=True)
class NodesOfShard(NodesOfType, ShardPreparation):
    """Copies the arrays of the part's nodes of one type."""

    part: Part

    def copy(self, files: GraphFiles, count: int, journal: Journal, progress: Progress) -> None:
        told = blake2b(repr(files.num_nodes).encode(), digest_size=16)
        tell_arrays(told, self._small_of_all(files, count), files.arrays)
        journal.record(digest=told.hexdigest())
        super().copy(files, count, journal, progress)

    @cached_property
    def _own(self) -> Any:
        return self.part.nodes


@dataclass(frozen=True, kw_only=True)
class TypedShardPreparation(TypedPreparation):
    """The settings of :func:`prepare_typed_shard`."""

    index: int = 0
    num_shards: int = 1
    assignment: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, num_shards=self.num_shards)
        check_below(self.num_shards, "shards", index=self.index)
        if self.assignment is not None:
            self._check_assignment(self.assignment)

    def estimate(self) -> Estimate:
        return of_one_shard(estimate_of(self._tables(), self.reverse, gathers=True), self.num_shards)

    def run(self, on_progress: OnProgress) -> Prepared:
        check_division(self.out.parent, self.num_shards, lambda there: there.num_shards == self.num_shards)
        return super().run(on_progress)

    def _check_assignment(self, folder: Path) -> None:
        kinds = self._tables().nodes
        found = {file.stem for file in folder.glob("*.npy")} if folder.is_dir() else set()
        if found != set(kinds):
            wrong = sorted(set(kinds) - found) or sorted(found - set(kinds))
            raise ValueError(
                f"assignment ({folder}) must be a folder with one .npy for each node type ({shown(list(kinds))}), and "
                f"{'lacks' if set(kinds) - found else 'has'} {wrong[0]}.npy: give the shard of each node of a type."
            )

    def _inputs(self) -> dict[str, Any]:
        files = sorted(self.assignment.glob("*.npy")) if self.assignment is not None else []
        times = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return super()._inputs() | {"index": self.index, "num_shards": self.num_shards, "assignment": times}

    def _part(self, kind: str, num_nodes: int) -> Part:
        """The nodes of a type that are in this shard."""
        if kind not in self._numberings:
            self._numberings[kind] = (
                Numbering.spread(num_nodes, self.num_shards)
                if self.assignment is None
                else Numbering.read(self.assignment / f"{kind}.npy", num_nodes, self.num_shards)
            )
        return Part(self._numberings[kind], self.index)

    @cached_property
    def _numberings(self) -> dict[str, Numbering]:
        return {}

    def _read_tables(self, tables: TypedTables, on_progress: OnProgress) -> dict[str, Part]:
        parts = super()._read_tables(tables, on_progress)
        sizes = np.sum([part.numbering.bounds for part in parts.values()], 0)
        if int(sizes[self.index + 1] - sizes[self.index]) == 0:
            raise ValueError(f"No node belongs to shard {self.index} of {self.num_shards}: every shard needs one.")
        return parts

    def _nodes_of(self, part: Part, draft: Path, settings: dict[str, Any]) -> NodesOfType:
        return NodesOfShard(draft=draft, part=part, **settings)

    def _must_gather(self, path: Path) -> bool:
        return True

    def _merge(self, parts: dict[str, Part], edge_types: list[EdgeType], progress: Progress) -> dict[str, Any]:
        senders = offsets_of([part.num_all for part in parts.values()])
        return super()._merge(parts, edge_types, progress) | {"senders": list(senders)}

    def _tell(self, types: GraphTypes, parts: dict[str, Part]) -> None:
        """Write where each shard begins, and a hash of all that the shards of a graph must have in common."""
        nodes = torch.stack([torch.from_numpy(part.numbering.bounds) for part in parts.values()])
        journals = {kind: Journal(self._of_edges(kind), {}) for kind in types.edge_types}
        edges = torch.tensor([[0, *journal.get("counts")] for journal in journals.values()]).cumsum(1)
        bounds = TypedBounds(types.node_types, types.edge_types, nodes, edges, seeds_of(types))
        starts = {"nodes": nodes.sum(0).tolist(), "edges": edges.sum(0).tolist()}
        about = {"fingerprint": self._digest(types, parts, journals), **starts, "types": bounds.about}
        write_new_index(self.out.parent, about)

    def _digest(self, types: GraphTypes, parts: dict[str, Part], of_edges: dict[EdgeType, Journal]) -> str:
        nodes = [
            (kind, part.numbering.digest, Journal(self._of_nodes(kind), {}).get("digest"))
            for kind, part in parts.items()
        ]
        edges = [(kind, journal.get("digest")) for kind, journal in of_edges.items()]
        arrays = [(name, str(array.dtype), list(array.shape[1:])) for name, array in sorted(types.arrays.items())]
        return blake2b(repr((nodes, edges, arrays, self.time)).encode(), digest_size=16).hexdigest()
