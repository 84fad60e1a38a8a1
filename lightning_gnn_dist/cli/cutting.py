"""Partitions as a command line asks for them, by the names of partitioners."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner
from lightning_gnn_dist.wire.memory import memory_bytes


def partitioner_of(name: str, options: argparse.Namespace, graph: Graph) -> Partitioner:
    """The partitioner of that name, or the one that suits a graph, with the settings on the command line."""
    if name == "auto":
        found = default_partitioner(graph.num_edges, memory_bytes())
        name = "metis" if isinstance(found, MetisPartitioner) else "streaming"
    if name == "metis":
        return MetisPartitioner(balance=options.balance)
    if name == "random":
        return RandomPartitioner()
    if name == "streaming":
        return StreamingPartitioner()
    clusters = StreamingPartitioner() if name == "streaming-supernodes" else None
    return SuperNodePartitioner(options.supernodes, clusters)


def partition_of(options: argparse.Namespace, graph: Graph, num_parts: int) -> Partition:
    """The partition that is asked for; ``--balance`` for a partitioner that cannot follow it is refused."""
    partitioner = partitioner_of(options.partitioner, options, graph)
    if options.balance != "nodes" and not isinstance(partitioner, MetisPartitioner):
        raise ValueError(
            f"--balance {options.balance} is for METIS, and {type(partitioner).__name__} evens out nodes: leave it "
            "out, or cut with --partitioner metis."
        )
    return cached_partition(graph, partitioner, num_parts, options.seed)


def sizes_of(partition: Partition) -> str:
    """How many nodes its parts have, in words."""
    sizes = partition.counts()
    return f"{int(sizes.min()):,} to {int(sizes.max()):,} nodes"


def tell_of(bounds: Any) -> None:
    """Print what a graph in shards has of types and of held edges."""
    for about in (bounds.types if bounds.types.have_names else None, bounds.links):
        if about is not None:
            print(about)
