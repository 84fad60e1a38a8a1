"""Which shard of a graph a host makes for itself, of files that every host reads: no host has, or writes, the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gnn_dist.checks import check_below, check_file, check_path, shown
from lightning_gnn_dist.prepare.steps.numbering import Numbering
from lightning_gnn_dist.rules import Count, check_fields


@dataclass(frozen=True)
class OneShard:
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

    def __post_init__(self) -> None:
        check_fields(self)
        check_below(self.num_shards, "shards", index=self.index)
        if self.assignment is not None:
            check_path("assignment", self.assignment)


def numbering_of(shard: OneShard, kind: str, num_nodes: int) -> Numbering:
    """The shard of each node of a type, whose name is empty if the graph has no types."""
    if shard.assignment is None:
        return Numbering.ranges(num_nodes, shard.num_shards)
    return Numbering.read(Path(shard.assignment, f"{kind}.npy" if kind else ""), num_nodes, shard.num_shards)


def check_assignment(shard: OneShard, kinds: Iterable[str]) -> None:
    """Refuse an assignment that does not fit the node types."""
    wanted = list(kinds)
    if shard.assignment is None:
        return
    if wanted == [""]:
        check_file("assignment", shard.assignment)
        return
    folder = Path(shard.assignment)
    found = {file.stem for file in folder.glob("*.npy")} if folder.is_dir() else set()
    if found != set(wanted):
        wrong = sorted(set(wanted) - found) or sorted(found - set(wanted))
        raise ValueError(
            f"assignment ({folder}) must be a folder with one .npy for each node type ({shown(wanted)}), and "
            f"{'lacks' if set(wanted) - found else 'has'} {wrong[0]}.npy: give the shard of each node of a type."
        )


def inputs_of(shard: OneShard) -> dict[str, Any]:
    """What the shard depends on beside the files of the graph."""
    path = Path(shard.assignment or "")
    files = [] if shard.assignment is None else sorted(path.glob("*.npy")) if path.is_dir() else [path]
    times = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {"index": int(shard.index), "num_shards": int(shard.num_shards), "assignment": times}
