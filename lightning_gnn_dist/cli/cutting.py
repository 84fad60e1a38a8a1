"""``lightning-gnn-dist divide`` and ``reorder``: a graph in shards, or chunk by chunk; partitioners by their names."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from lightning_gnn_dist.cli.options import check_free
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.store import check_target, holds_split
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.kaminpar import KaMinParPartitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY
from lightning_gnn_dist.wire.memory import memory_bytes

SHARDS = "lightning_gnn_dist.extensions.shards.divide"
REORDER = "lightning_gnn_dist.extensions.larger_than_memory.reorder"


def partitioner_of(name: str | None, options: argparse.Namespace, graph: Graph) -> Partitioner:
    """The partitioner of that name, or the one that suits a graph, with the settings on the command line."""
    if name in (None, "auto"):
        found = default_partitioner(graph.num_edges, memory_bytes())
        name = {MetisPartitioner: "metis", KaMinParPartitioner: "kaminpar"}.get(type(found), "streaming")
    if name == "metis":
        return MetisPartitioner(balance=options.balance)
    if name == "kaminpar":
        return KaMinParPartitioner(balance=options.balance)
    if name == "random":
        return RandomPartitioner()
    if name == "streaming":
        return StreamingPartitioner()
    clusters = {"streaming": StreamingPartitioner, "kaminpar": KaMinParPartitioner}.get(name.partition("-")[0])
    return SuperNodePartitioner(options.supernodes, None if clusters is None else clusters())


def partition_of(options: argparse.Namespace, graph: Graph, num_parts: int) -> Partition:
    """The partition that is asked for; ``--balance`` for a partitioner that cannot follow it is refused."""
    if options.balance != "nodes" and options.partitioner not in (None, "auto", "metis", "kaminpar"):
        raise ValueError(
            f"--balance {options.balance} is for --partitioner metis and kaminpar, and {options.partitioner} evens out "
            "nodes: leave one of the two out."
        )
    return cached_partition(graph, partitioner_of(options.partitioner, options, graph), num_parts, options.seed)


def sizes_of(partition: Partition) -> str:
    """How many nodes its parts have, in words."""
    sizes = partition.counts()
    return f"{int(sizes.min()):,} to {int(sizes.max()):,} nodes"


def divide(options: argparse.Namespace) -> None:
    """Divide a saved graph or split into shards, so that no host needs all of it."""
    split = extension("split of edges").open(options.graph) if holds_split(options.graph) else None
    graph = Graph.open(options.graph) if split is None else split.graph
    partition = partition_of(options, graph, options.parts)
    import_module(SHARDS).save_shards(graph if split is None else split, partition, options.output)
    print(f"{options.output}: {options.parts} shards of {sizes_of(partition)}.")
    tell_of(extension("index of shards").read(options.output))
    name = "PartitionedDataModule" if split is None else "LinkDataModule"
    print(f"Copy shares.json and shard r to the host of rank r, and train on {name}(path).")


def tell_of(bounds: Any) -> None:
    """Print what a graph in shards has of types and of held edges."""
    for about in (bounds.types if have_names(bounds.types) else None, bounds.links):
        if about is not None:
            print(about)


def reorder(options: argparse.Namespace) -> None:
    """Write a saved graph chunk by chunk, so that some chunks at a time are read fast."""
    if holds_split(options.graph):
        raise ValueError(f"{options.graph} holds a split of edges, and a graph is needed: reorder that one.")
    check_free(options.output, overwrite=options.overwrite)
    check_target(options.output, overwrite=options.overwrite)
    graph = Graph.open(options.graph)
    partition = partition_of(options, graph, options.chunks)
    how = {"memory_bytes": options.memory or DEFAULT_MEMORY, "overwrite": options.overwrite}
    import_module(REORDER).reorder_graph(graph, partition, options.output, **how)
    print(f"{options.output}: {options.chunks} chunks of {sizes_of(partition)}.")
