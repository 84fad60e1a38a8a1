"""Divides a graph that is there into shards: a rank, or a host, has one of them.

Edges that are held back from a graph lie with the shards that own their receivers. Ends have the ids of the whole graph
that the shards make; of a graph with types, those in their types.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_folder, check_instance
from lightning_gnn_dist.graph.convert import fingerprint_of, index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.shard import LinkBounds, TypedBounds, seeds_of, write_index
from lightning_gnn_dist.graph.storage.files import folder_beside
from lightning_gnn_dist.graph.storage.store import shard_name
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.whole_rows import order_of_types, whole_rows


class SplitOfEdges(Protocol):
    """A graph of training edges, and edges that are held back from it: a ``LinkSplit``."""

    @property
    def graph(self) -> Graph: ...

    @property
    def edges(self) -> Mapping[str, Tensor]: ...

    @property
    def negatives(self) -> Mapping[str, Tensor]: ...

    @property
    def edge_type(self) -> EdgeType | None: ...

    @property
    def held_arrays(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    @property
    def fingerprint(self) -> str: ...

    def bounds(self, held: Mapping[str, Tensor]) -> LinkBounds: ...


def save_shards(graph: Graph | SplitOfEdges, partition: Partition, folder: str | Path) -> None:
    """Write a shard for every part. Nodes get new ids, part after part; ``n_id`` holds the old ones.

    Of a :class:`LinkSplit` the graph of training edges is divided, and each held edge lies with the shard that owns its
    receiver: :class:`LinkDataModule` learns edges of such shards.

    Of a typed graph the nodes of each type get new ids, part after part, and those of one type stay together; the
    ``n_id`` of a type holds the old ids in it. RAM holds one shard at a time, and numbers for every node. The folder
    appears when all of it is written.
    """
    graph, split = _graph_and_split(graph)
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


def _graph_and_split(given: Graph | SplitOfEdges) -> tuple[Graph, SplitOfEdges | None]:
    """Return the graph to divide, and the split that it is of, if edges are held back."""
    if isinstance(given, Graph):
        return given, None
    graph = getattr(given, "graph", None)
    if not isinstance(graph, Graph) or not hasattr(given, "negatives"):
        check_instance("graph", given, Graph, "a Graph, as Graph.from_pyg(data) makes it, or split_edges(graph)")
    return given.graph, given


def _write(graph: Graph, partition: Partition, folder: Path, split: SplitOfEdges | None) -> None:
    by_part = partition.assignment.argsort(stable=True)
    order = order_of_types(graph.types, partition)
    number = torch.empty(graph.num_nodes, dtype=index_dtype(graph.num_nodes))
    number[order] = torch.arange(graph.num_nodes, dtype=number.dtype)
    held = None if split is None else HeldEdges(split, partition.assignment, partition.num_parts, number)
    of_types = []
    for index, nodes in enumerate(by_part.split(partition.counts().tolist())):
        rows = whole_rows(graph, nodes, number)
        rows.save(folder / shard_name(index), beside={} if held is None else held.of_shard(index))
        of_types.append((list(rows.types.num_nodes.values()), rows.types.num_edges))
    fingerprint = graph.fingerprint if split is None else split.fingerprint
    bounds, links = bounds_of(graph.types, of_types), None if held is None else held.bounds
    write_index(folder, fingerprint, bounds, division=_division_of(partition), links=links)


def _division_of(partition: Partition) -> str:
    assignment = partition.assignment
    return fingerprint_of([("assignment", assignment.dtype, assignment.shape, [assignment])])


def bounds_of(types: GraphTypes, shards: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TypedBounds:
    """The bounds of shards of a graph, of which each has so many nodes and edges of each type."""
    nodes, edges = (torch.tensor(counts).T for counts in zip(*shards, strict=True))
    nodes, edges = (torch.cat([counts[:, :1] * 0, counts.cumsum(1)], 1) for counts in (nodes, edges))
    return TypedBounds(types.node_types, types.edge_types, nodes, edges, seeds_of(types))


class HeldEdges:
    """The held edges of a split, by the shards that own their receivers.

    Args:
        split: The split.
        owners: The shard of each node of its graph.
        num_shards: The number of shards.
        number: The new id of each node.
    """

    def __init__(self, split: SplitOfEdges, owners: Tensor, num_shards: int, number: Tensor) -> None:
        self._split, self._number, types = split, number, split.graph.types
        sender, _, receiver = split.edge_type or ("", "", "")
        self._first = types.nodes_of(sender).start, types.nodes_of(receiver).start
        of_edges = {name: owners[edges[1].to(torch.int64) + self._first[1]] for name, edges in split.edges.items()}
        self._order = {name: of.argsort(stable=True) for name, of in of_edges.items()}
        counts = {name: torch.bincount(of.to(torch.int64), minlength=num_shards) for name, of in of_edges.items()}
        self._starts = {name: torch.cat([of[:1] * 0, of.cumsum(0)]) for name, of in counts.items()}

    @cached_property
    def bounds(self) -> LinkBounds:
        """How many held edges each shard has."""
        return self._split.bounds(self._starts)

    def of_shard(self, index: int) -> dict[str, Tensor]:
        """Return the arrays of a shard's held edges, by the names of their files."""
        return dict(self._arrays(index))

    def _arrays(self, index: int) -> Iterator[tuple[str, Tensor]]:
        split = self._split
        for name, edges in split.edges.items():
            first, end = self._starts[name][index : index + 2].tolist()
            at = self._order[name][first:end]
            yield f"links/{name}_edges", torch.stack([self._new(edges[i][at], self._first[i]) for i in (0, 1)])
            if name in split.negatives:
                yield f"links/{name}_negatives", self._new(take_rows(split.negatives[name], at), self._first[1])
            for array, rows in split.held_arrays.get(name, {}).items():
                yield f"links/{name}/{array}", take_rows(rows, at)

    def _new(self, ids: Tensor, first: int) -> Tensor:
        """Return new ids for some, both counted from the first of their type."""
        found = self._number[ids.to(torch.int64) + first] - first
        return found.to(index_dtype(self._split.graph.num_nodes))
