"""``lightning-gnn-dist divide``: divide a saved graph into shards, so that no host needs all of it."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.cli.partitioners import partitioner_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.prepare.shard import Bounds, save_shards


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        graph = Graph.open(options.graph)
        if options.balance != "nodes" and options.partitioner not in (None, "metis"):
            raise ValueError(
                f"--balance {options.balance} is for --partitioner metis, and {options.partitioner} evens out nodes: "
                "leave one of the two out."
            )
        partitioner = partitioner_of(options.partitioner, options)
        partition = cached_partition(graph, partitioner, options.parts, options.seed)
        save_shards(graph, partition, options.output)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist divide: {error}") from error
    sizes = partition.counts()
    print(f"{options.output}: {options.parts} shards of {int(sizes.min()):,} to {int(sizes.max()):,} nodes.")
    if graph.types is not None:
        print(Bounds.read(options.output).types)
    print("Copy shares.json and shard r to the host of rank r, and train on ShardedDataModule(path).")
