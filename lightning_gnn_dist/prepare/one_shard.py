"""Which shard of a graph a host makes for itself, of files that every host reads: no host has, or writes, the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist.checks import check_below, check_file, check_path, shown
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.nodes import NodesOfType
from lightning_gnn_dist.prepare.numbering import Numbering
from lightning_gnn_dist.prepare.shard import INDEX, Bounds
from lightning_gnn_dist.prepare.shard import write_index as write_whole_index
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds, seeds_of
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
        return (Numbering.spread if kind else Numbering.ranges)(num_nodes, shard.num_shards)
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


def check_division(shard: OneShard, folder: Path, nodes: list[int] | None = None) -> None:
    """Refuse a folder with shards of another division; ``nodes`` says where each shard begins, if that is known."""
    if not (folder / INDEX).exists():
        return
    there = Bounds.read(folder)
    if there.num_shards != shard.num_shards or nodes not in (None, there.nodes.tolist()):
        raise ValueError(
            f"{folder / INDEX} describes {there.num_shards} shards that are not these {shard.num_shards}: choose "
            "another directory, or give the settings that the others were made with."
        )


def write_index(
    folder: Path,
    nodes: Mapping[str, NodesOfType],
    types: GraphTypes | None,
    edges: Mapping[EdgeType, Journal],
    undirected: bool,
    time: str | None,
) -> None:
    """Write where each shard begins, and a hash of all that the shards of a graph must have in common.

    Args:
        folder: The directory of the shards. One with shards of another graph is refused.
        nodes: The nodes of each type.
        types: The types of the shard, if it has any.
        edges: For each edge type, what is known of all edges.
        undirected: Whether the reverse of every edge was added.
        time: The array of times, if there is one.
    """
    starts = torch.stack([torch.from_numpy(of_kind.part.numbering.bounds) for of_kind in nodes.values()])
    told = {edge_type: journal.get("digest") for edge_type, journal in edges.items()}
    digest = _digest(nodes, types, told, undirected, time)
    about: dict[str, Any] = {"fingerprint": digest, "nodes": starts.sum(0).tolist()}
    if types is not None:
        counts = torch.tensor([[0, *journal.get("counts")] for journal in edges.values()]).cumsum(1)
        bounds = TypedBounds(types.node_types, types.edge_types, starts, counts, seeds_of(types))
        about |= {"edges": counts.sum(0).tolist(), "types": bounds.about}
    there = folder / INDEX
    if there.exists() and Bounds.read(folder).fingerprint != digest:
        raise ValueError(
            f"{there} describes shards of other edges, labels or settings than these: choose another directory, "
            "or make all shards from the same files."
        )
    write_whole_index(folder, about)


def _digest(
    nodes: Mapping[str, NodesOfType],
    types: GraphTypes | None,
    edges: Mapping[EdgeType, list[str]],
    undirected: bool,
    time: str | None,
) -> str:
    if types is None:
        (of_all,), (told,) = nodes.values(), edges.values()
        digest = blake2b(repr((told, of_all.part.numbering.digest, undirected)).encode(), digest_size=16)
        of_all.tell(digest)
        return digest.hexdigest()
    of_nodes = []
    for kind, of_kind in nodes.items():
        digest = blake2b(repr(of_kind.files.num_nodes).encode(), digest_size=16)
        of_kind.tell(digest)
        of_nodes.append((kind, of_kind.part.numbering.digest, digest.hexdigest()))
    of_edges = [(edge_type, told) for edge_type, (told,) in edges.items()]
    arrays = [(name, str(array.dtype), list(array.shape[1:])) for name, array in sorted(types.arrays.items())]
    return blake2b(repr((of_nodes, of_edges, arrays, time)).encode(), digest_size=16).hexdigest()
