"""Divides a graph that is there into shards: a rank, or a host, has one of them.

Edges that are held back from a graph lie with the shards that own their receivers. Ends have the ids of the whole graph
that the shards make; of a graph with types, those in their types.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_folder, check_instance
from lightning_gnn_dist.extensions.larger_than_memory.whole_rows import order_of_types, whole_rows
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.shards.index import Bounds, TypedBounds, seeds_of
from lightning_gnn_dist.graph.convert import fingerprint_of, index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.storage.files import folder_beside
from lightning_gnn_dist.graph.storage.store import shard_name
from lightning_gnn_dist.partition.base import Partition

Held = Callable[[int], dict[str, Tensor]]  # the arrays of a shard's held edges, by the names of their files


def save_shards(graph: Graph | LinkSplit, partition: Partition, folder: str | Path) -> None:
    """Write a shard for every part. Nodes get new ids, part after part; ``n_id`` holds the old ones.

    Of a :class:`LinkSplit` the graph of training edges is divided, and each held edge lies with the shard that owns its
    receiver: :class:`LinkDataModule` learns edges of such shards.

    Of a typed graph the nodes of each type get new ids, part after part, and those of one type stay together; the
    ``n_id`` of a type holds the old ids in it. RAM holds one shard at a time, and numbers for every node. The folder
    appears when all of it is written.
    """
    split = graph if isinstance(graph, LinkSplit) else None
    graph = graph.graph if isinstance(graph, LinkSplit) else graph
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it, or split_edges(graph)")
    check_instance("partition", partition, Partition, "a Partition, as MetisPartitioner()(graph, 4, seed=0) makes it")
    folder = check_folder("folder", folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already. Choose another path, or remove it.")
    if partition.assignment.numel() != graph.num_nodes:
        raise ValueError(
            f"The partition assigns {partition.assignment.numel()} nodes, but the graph has {graph.num_nodes}: divide "
            "the graph that was partitioned."
        )
    graph.check_whole()
    if not (counts := partition.counts()).all():
        raise ValueError(f"Part {int(counts.argmin())} of the partition has no nodes, and each shard needs one.")
    with folder_beside(folder) as draft:
        _write(graph, partition, draft, split)
        os.rename(draft, folder)


def _write(graph: Graph, partition: Partition, folder: Path, split: LinkSplit | None) -> None:
    by_part, types = partition.assignment.argsort(stable=True), graph.types
    number = torch.empty(graph.num_nodes, dtype=index_dtype(graph.num_nodes))
    number[order_of_types(types, partition)] = torch.arange(graph.num_nodes, dtype=number.dtype)
    held, starts = (None, None) if split is None else _held_edges(split, partition, number)
    counts = list[Sequence[int]](), list[Sequence[int]]()
    for index, nodes in enumerate(by_part.split(partition.counts().tolist())):
        rows = whole_rows(graph, nodes, number)
        rows.save(folder / shard_name(index), beside={} if held is None else held(index))
        counts[0].append(list(rows.types.num_nodes.values()))
        counts[1].append(rows.types.num_edges)
    nodes, edges = (_starts(torch.tensor(of).T) for of in counts)
    of_types = TypedBounds(types.node_types, types.edge_types, nodes, edges, seeds_of(types))
    assignment = partition.assignment
    division = fingerprint_of([("assignment", assignment.dtype, assignment.shape, [assignment])])
    links = None if split is None or starts is None else split.bounds(starts)
    fingerprint = graph.fingerprint if split is None else split.fingerprint
    Bounds(fingerprint, of_types, division, links).write(folder)


def _held_edges(split: LinkSplit, partition: Partition, number: Tensor) -> tuple[Held, dict[str, Tensor]]:
    """Return what gives the held edges of a shard, those whose receivers it owns, and where those of each begin.

    Args:
        split: The split.
        partition: The shard of each node of its graph.
        number: The new id of each node.
    """
    sender, _, receiver = split.edge_type or ("", "", "")
    first = [split.graph.types.nodes_of(kind).start for kind in (sender, receiver)]
    shards = {name: partition.assignment[ends[1].to(torch.int64) + first[1]] for name, ends in split.edges.items()}
    order = {name: of.argsort(stable=True) for name, of in shards.items()}
    counts = {name: torch.bincount(of.to(torch.int64), minlength=partition.num_parts) for name, of in shards.items()}
    starts = {name: _starts(of) for name, of in counts.items()}

    def new(ids: Tensor, first: int) -> Tensor:
        """New ids for some, both counted from the first of their type."""
        return (number[ids.to(torch.int64) + first] - first).to(number.dtype)

    def of_shard(index: int) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, ends in split.edges.items():
            at = order[name][slice(*starts[name][index : index + 2].tolist())]
            found[f"links/{name}_edges"] = torch.stack([new(ends[i][at], first[i]) for i in (0, 1)])
            if name in split.negatives:
                found[f"links/{name}_negatives"] = new(take_rows(split.negatives[name], at), first[1])
            carried = split.held_arrays.get(name, {}).items()
            found |= {f"links/{name}/{array}": take_rows(rows, at) for array, rows in carried}
        return found

    return of_shard, starts


def _starts(counts: Tensor) -> Tensor:
    """How many those before each one have, and at the end all."""
    return torch.cat([counts[..., :1] * 0, counts.cumsum(-1)], -1)
