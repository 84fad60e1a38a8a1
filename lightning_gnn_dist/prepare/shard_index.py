"""What the hosts that make the shards of a graph have in common: where each begins, and a hash of what they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from lightning_gnn_dist.graph.shard import INDEX, Bounds, TypedBounds, seeds_of
from lightning_gnn_dist.graph.shard import write_index as write_whole_index
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.prepare.one_shard import OneShard, Part
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import NodesOfType


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


def check_nodes(shard: OneShard, folder: Path, parts: Sequence[Part]) -> None:
    """Refuse a division that is not that of the shards in the folder, and a shard without nodes."""
    starts = np.sum([part.starts for part in parts], 0)
    check_division(shard, folder, starts.tolist())
    empty = np.flatnonzero(np.diff(starts) == 0)
    if empty.size and (shard.together or shard.index in empty):
        index = empty[0] if shard.together else shard.index
        raise ValueError(f"No node belongs to shard {index} of {shard.num_shards}: every shard needs one.")


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
    starts = torch.stack([torch.from_numpy(of_kind.part.starts) for of_kind in nodes.values()])
    told = {edge_type: str(journal.get("digest")) for edge_type, journal in edges.items()}
    digest = _digest(nodes, types, told, undirected, time)
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
        digest = blake2b(repr((told, of_all.part.digest, undirected)).encode(), digest_size=16)
        of_all.tell(digest)
        return digest.hexdigest()
    of_nodes = []
    for kind, of_kind in nodes.items():
        digest = blake2b(repr(of_kind.files.num_nodes).encode(), digest_size=16)
        of_kind.tell(digest)
        of_nodes.append((kind, of_kind.part.digest, digest.hexdigest()))
    of_edges = [*edges.items()]
    arrays = [(name, str(array.dtype), list(array.shape[1:])) for name, array in sorted(types.arrays.items())]
    return blake2b(repr((of_nodes, of_edges, arrays, time)).encode(), digest_size=16).hexdigest()
