"""Which shard of a graph a host makes for itself, of files that every host reads: no host has, or writes, the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_gnn_dist.checks import check_below, check_file, check_path, shown
from lightning_gnn_dist.extensions.shards.cutting import cut
from lightning_gnn_dist.extensions.shards.prepared_edges import ShardEdges
from lightning_gnn_dist.extensions.shards.prepared_index import check_alike, check_division, write_index
from lightning_gnn_dist.extensions.shards.prepared_nodes import NodesOfShard
from lightning_gnn_dist.extensions.shards.prepared_part import ShardPart
from lightning_gnn_dist.extensions.shards.shared_reading import Reading, ReadsAll, ReadsShare
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.prepare.files.inputs import EDGE, Inputs
from lightning_gnn_dist.prepare.portion import RENAMED, WRITTEN, Portion
from lightning_gnn_dist.prepare.steps.edges import EdgeSorting, OnProgress
from lightning_gnn_dist.prepare.steps.nodes import NodesOfType
from lightning_gnn_dist.rules import Count, check_fields
from lightning_gnn_dist.wire.collectives import rank, world_size


@dataclass(frozen=True)
class OneShard(Portion):
    """The shard that :func:`prepare_graph` writes, of so many in all.

    Args:
        index: The number of the shard, from 0.
        num_shards: How many shards there are in all.
        assignment: A ``.npy`` with the shard of each node; of a graph with types a folder with a file for each node
            type, ``paper.npy``, with the shard of each of its nodes, in the order of their table. With ``together`` and
            without types also a ``RandomPartitioner()`` or ``StreamingPartitioner()``, which no rank needs the whole
            graph for; the seed is that of the split. Default: consecutive nodes, of each type equally many in each
            shard.
        together: Whether the ranks of this process's group make all shards now, each the one of its number. Then each
            reads its share of the files and sends the others what is of their shards; otherwise every host reads all.
    """

    index: int
    num_shards: Count
    assignment: str | Path | Partitioner | None = None
    together: bool = False
    is_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_below(self.num_shards, "shards", index=self.index)
        here = ReadsShare()
        if self.together and (here.index, here.num_readers) != (self.index, self.num_shards):
            raise ValueError(
                f"together=True makes shard {self.index} of {self.num_shards} on rank {self.index} of as many, and "
                f"this process is rank {here.index} of {here.num_readers}: start a rank for each shard with torchrun."
            )
        if callable(self.assignment):
            self._check_partitioner(self.assignment)
        elif self.assignment is not None:
            check_path("assignment", self.assignment)

    def _check_partitioner(self, partitioner: Partitioner) -> None:
        is_ordered = isinstance(partitioner, StreamingPartitioner) and partitioner.order == "natural"
        if not (is_ordered or isinstance(partitioner, RandomPartitioner)):
            raise ValueError(
                f"{partitioner} needs the whole graph, which no rank has: use RandomPartitioner() or "
                "StreamingPartitioner(), or cut the graph on a host that can hold it, and give the parts of its nodes "
                "as assignment, a .npy."
            )
        if not self.together:
            raise ValueError(
                f"{partitioner} cuts what ranks read together, and this host reads by itself: give together=True, or "
                "the parts of nodes, a .npy."
            )

    @property
    def reading(self) -> Reading:
        """Who reads the files."""
        return ReadsShare() if self.together else ReadsAll()

    @property
    def shares(self) -> tuple[int | None, int]:
        return self.num_shards, self.reading.num_readers

    def target(self, out: Path) -> Path:
        return out / store.shard_name(self.index)

    @property
    def facts(self) -> dict[str, Any]:
        of_all: dict[str, Any] = {"num_shards": int(self.num_shards), "together": self.together, "partitioner": None}
        if callable(self.assignment):
            return {"index": int(self.index), "assignment": [], **of_all, "partitioner": repr(self.assignment)}
        path = Path(self.assignment or "")
        files = [] if self.assignment is None else sorted(path.glob("*.npy")) if path.is_dir() else [path]
        times = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {"index": int(self.index), "assignment": times, **of_all}

    def check_inputs(self, inputs: Inputs) -> None:
        self._check_assignment(inputs.nodes)
        tables = [files.source for files in inputs.nodes.values() if files.table is not None]
        if self.together and tables:
            raise ValueError(
                f"{tables[0]} is a table of nodes, and ranks that read the files together take arrays of nodes: let "
                f"each host read all files (--shard {self.index} --num-shards {self.num_shards}, without torchrun)."
            )
        if not inputs.have_names and (found := [*inputs.edges[EDGE].carried.arrays, *inputs.edges[EDGE].columns]):
            raise ValueError(  # nobody who makes a shard would know their numbers among all edges
                f"{found[0]} belongs to edges, which shards made on their own hosts cannot carry: leave it out (--drop "
                f"{found[0]}), or prepare the whole graph and divide it."
            )

    def begin(
        self, out: Path, source: Path, facts: Mapping[str, Any], stage: Callable[[], int], *, overwrite: bool
    ) -> bool:
        """All ranks raise, or none."""
        check_division(out, self.num_shards)
        check_alike(self.reading, facts, source)
        own = stage()
        stages = self.reading.each(own)
        if all(stages) and WRITTEN in stages:
            return True
        if RENAMED in stages and own != RENAMED and not overwrite:
            raise FileExistsError(
                f"The shard of rank {stages.index(RENAMED)} exists already: choose another directory, or overwrite it."
            )
        return False

    def agree(self, is_done: bool) -> bool:
        return all(self.reading.each(is_done))

    def edges(self, inputs: Inputs, folder: Path, draft: Path, undirected: bool, memory_bytes: int) -> ShardEdges:
        found = ShardEdges(inputs, folder, draft, undirected, memory_bytes, self.reading)
        if not isinstance(self.assignment, StreamingPartitioner):
            return found
        ranges = folder / "ranges"  # of nodes, by which edges are sorted before they are cut
        return replace(found, ranges=replace(found, folder=ranges, draft=ranges / "graph"))

    def part(
        self, kind: str, num_nodes: int, edges: EdgeSorting, seed: int, folder: Path, on_progress: OnProgress
    ) -> ShardPart:
        ranges = ShardPart.ranges(num_nodes, self.num_shards, self.index)
        if self.assignment is None:
            return ranges
        if callable(self.assignment):
            assert isinstance(edges, ShardEdges)
            return cut(self.assignment, ranges, edges.ranges, seed, self.reading, folder, on_progress)
        file = Path(self.assignment, f"{kind}.npy" if kind else "")
        return ShardPart.read(file, num_nodes, self.num_shards, self.index, self.reading)

    def count(self, source: Path, edges: EdgeSorting, on_progress: OnProgress) -> int:
        raise ValueError(
            f"{source} does not say how many nodes there are, and the host of a shard must know before it reads: add "
            "num_nodes.npy, x or y."
        )

    def nodes_of(self, **given: Any) -> NodesOfShard:
        return NodesOfShard(reading=self.reading, **given)

    def check_nodes(self, out: Path, parts: Sequence[Any]) -> None:
        starts = np.sum([part.starts for part in parts], 0)
        check_division(out, self.num_shards, starts.tolist())
        empty = np.flatnonzero(np.diff(starts) == 0)
        if empty.size and (self.together or self.index in empty):
            index = empty[0] if self.together else self.index
            raise ValueError(f"No node belongs to shard {index} of {self.num_shards}: every shard needs one.")

    def finish(
        self,
        out: Path,
        nodes: Mapping[str, NodesOfType],
        types: GraphTypes | None,
        edges: EdgeSorting,
        edge_types: Collection[EdgeType],
    ) -> None:
        write_index(out, nodes, types, {each: edges.journal(each) for each in edge_types}, edges)

    def _check_assignment(self, kinds: Iterable[str]) -> None:
        """Refuse an assignment that does not fit the node types."""
        wanted = list(kinds)
        if self.assignment is None:
            return
        if callable(self.assignment):
            if wanted != [""]:
                raise ValueError(
                    f"{self.assignment} cuts graphs without types here: give a folder with the shard of each node of "
                    f"{shown(wanted)}, or leave assignment out."
                )
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


def shard_of_rank(assignment: str | Path | None, partitioner: str | None) -> OneShard:
    """The shard of this rank of torchrun, whose nodes a partitioner with such a name finds, if one is named."""
    known = {"random": RandomPartitioner, "streaming": StreamingPartitioner, "metis": MetisPartitioner}
    return OneShard(rank(), world_size(), assignment if partitioner is None else known[partitioner](), together=True)
