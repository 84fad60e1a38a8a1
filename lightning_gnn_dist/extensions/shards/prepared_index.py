"""What the hosts that make the shards of a graph have in common: where each begins, and a hash of what they are of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist.extensions.shards.prepared_part import ShardPart
from lightning_gnn_dist.extensions.shards.shared_reading import Reading
from lightning_gnn_dist.graph.shard import INDEX, Bounds, TypedBounds, seeds_of
from lightning_gnn_dist.graph.shard import write_index as write_whole_index
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.prepare.steps.edges import EdgeSorting
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import NodesOfType


def check_division(folder: Path, num_shards: int, nodes: list[int] | None = None) -> None:
    """Refuse a folder with shards of another division; ``nodes`` says where each shard begins, if that is known."""
    if not (folder / INDEX).exists():
        return
    there = Bounds.read(folder)
    if there.num_shards != num_shards or nodes not in (None, there.nodes.tolist()):
        raise ValueError(
            f"{folder / INDEX} describes {there.num_shards} shards that are not these {num_shards}: choose "
            "another directory, or give the settings that the others were made with."
        )


def check_alike(reading: Reading, inputs: Mapping[str, Any], source: Path) -> None:
    """Refuse ranks that were given other files or settings than rank 0. All raise or none.

    Files are compared by their places in ``source`` and their sizes: each host may have them elsewhere.
    """
    told: dict[str, Any] = {name: value for name, value in inputs.items() if name not in ("files", "shard")}
    shard = inputs["shard"] or {}
    told["parts"] = [size for _, size, _ in shard.get("assignment", ())], shard.get("partitioner")
    told["files"] = sorted([_name(Path(path), source), size] for path, (size, _) in inputs["files"].items())
    digest = blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=7).digest()
    found = reading.each(int.from_bytes(digest, "big"))
    if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise ValueError(
            f"Ranks {odd} were given other files or settings than rank 0: start all with the same command, on the same "
            "files."
        )


def _name(path: Path, source: Path) -> str:
    return str(path.relative_to(source)) if path.is_relative_to(source) else path.name


def write_index(
    folder: Path,
    nodes: Mapping[str, NodesOfType],
    types: GraphTypes | None,
    edges: Mapping[EdgeType, Journal],
    sorting: EdgeSorting,
) -> None:
    """Write where each shard begins, and a hash of all that the shards of a graph must have in common.

    Args:
        folder: The directory of the shards. One with shards of another graph is refused.
        nodes: The nodes of each type.
        types: The types of the shard, if it has any.
        edges: For each edge type, what is known of all edges.
        sorting: How edges were sorted.
    """
    starts = torch.stack([torch.from_numpy(_part_of(of_kind).starts) for of_kind in nodes.values()])
    told = {edge_type: str(journal.get("digest")) for edge_type, journal in edges.items()}
    digest = _digest(nodes, types, told, sorting.undirected, sorting.inputs.time)
    bounds = TypedBounds.of_one(starts.sum(0), starts[0, :0])  # nobody counts the edges of all
    if types is not None:
        counts = torch.tensor([[0, *journal.get("counts")] for journal in edges.values()]).cumsum(1)
        bounds = TypedBounds(types.node_types, types.edge_types, starts, counts, seeds_of(types))
    there = folder / INDEX
    if there.exists() and Bounds.read(folder).fingerprint != digest:
        raise ValueError(
            f"{there} describes shards of other edges, labels or settings than these: choose another directory, "
            "or make all shards from the same files."
        )
    write_whole_index(folder, digest, bounds)


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
