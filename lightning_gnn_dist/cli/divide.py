"""``lightning-gnn-dist divide``: divide a saved graph into shards, so that no host needs all of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.partitioners import NAMES, add_options, partitioner_of
from lightning_gnn_dist.cli.values import Commands, positive
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.prepare.shard import save_shards


def add_to(commands: Commands) -> None:
    """Declare the command and its options."""
    divide = commands.add_parser("divide", help="divide a saved graph into shards, one for each rank")
    divide.add_argument("graph", type=Path, help="the directory of the graph")
    divide.add_argument("output", type=Path, help="the directory of the shards, which must not exist")
    divide.add_argument("--parts", type=positive, metavar="P", required=True, help="how many shards")
    divide.add_argument("--partitioner", choices=NAMES, default="metis", help="how (default: metis)")
    add_options(divide)
    divide.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        graph = Graph.open(options.graph)
        partitioner = partitioner_of(options.partitioner, options, graph)
        partition = cached_partition(graph, partitioner, options.parts, options.seed)
        save_shards(graph, partition, options.output)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist divide: {error}") from error
    sizes = partition.counts()
    print(f"{options.output}: {options.parts} shards of {int(sizes.min()):,} to {int(sizes.max()):,} nodes.")
    print("Copy shares.json and shard r to the host of rank r, and train on ShardedDataModule(path).")
