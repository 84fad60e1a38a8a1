"""Which shard of a graph a host makes for itself, of files that every host reads: no host has, or writes, the rest.

Beside the shard stands where each shard begins, and a hash of what the shards of a graph must have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from lightning_gnn_dist.checks import check_below, check_file, check_path, shown
from lightning_gnn_dist.extensions.shards.index import Bounds, TypedBounds, seeds_of
from lightning_gnn_dist.extensions.shards.prepared_edges import ShardEdges
from lightning_gnn_dist.extensions.shards.prepared_nodes import NodesOfShard, ShardPart
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.prepare.edges import EdgeSorting, OnProgress
from lightning_gnn_dist.prepare.nodes import NodesOfType
from lightning_gnn_dist.prepare.plan import EDGE, Plan
from lightning_gnn_dist.prepare.prepare_graph import Portion
from lightning_gnn_dist.rules import Count, check_fields


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

    @property
    def shares(self) -> int:  # type: ignore[override]  # of all of a graph it is a constant
        return self.num_shards

    def target(self, out: Path) -> Path:
        return out / store.shard_name(self.index)

    @property
    def facts(self) -> dict[str, Any]:  # type: ignore[override]  # likewise
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
