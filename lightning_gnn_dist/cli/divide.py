"""``lightning-gnn-dist divide``: divide a saved graph or split into shards, so that no host needs all of it."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.cli.partitioners import check_balance, partitioner_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.shard import Bounds
from lightning_gnn_dist.graph.storage.store import holds_split
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.prepare.divide import save_shards


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        split = extension("split of edges").open(options.graph) if holds_split(options.graph) else None
        graph = Graph.open(options.graph) if split is None else split.graph
        check_balance(options)
        partitioner = partitioner_of(options.partitioner, options, graph)
        partition = cached_partition(graph, partitioner, options.parts, options.seed)
        save_shards(graph if split is None else split, partition, options.output)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist divide: {error}") from error
    sizes = partition.counts()
    print(f"{options.output}: {options.parts} shards of {int(sizes.min()):,} to {int(sizes.max()):,} nodes.")
    bounds, name = Bounds.read(options.output), "PartitionedDataModule" if split is None else "LinkDataModule"
    for about in (bounds.types if have_names(bounds.types) else None, bounds.links):
        if about is not None:
            print(about)
    print(f"Copy shares.json and shard r to the host of rank r, and train on {name}(path).")
