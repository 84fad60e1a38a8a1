"""``lightning-gnn-dist divide``: divide a saved graph or split into shards, so that no host needs all of it."""

from __future__ import annotations

import argparse
from importlib import import_module

from lightning_gnn_dist.cli.inspect import tell_of
from lightning_gnn_dist.cli.partitioners import partition_of, sizes_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.store import holds_split
from lightning_gnn_dist.names import extension

SHARDS = "lightning_gnn_dist.extensions.shards.divide"


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        split = extension("split of edges").open(options.graph) if holds_split(options.graph) else None
        graph = Graph.open(options.graph) if split is None else split.graph
        partition = partition_of(options, graph, options.parts)
        import_module(SHARDS).save_shards(graph if split is None else split, partition, options.output)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist divide: {error}") from error
    print(f"{options.output}: {options.parts} shards of {sizes_of(partition)}.")
    tell_of(extension("index of shards").read(options.output))
    name = "PartitionedDataModule" if split is None else "LinkDataModule"
    print(f"Copy shares.json and shard r to the host of rank r, and train on {name}(path).")
