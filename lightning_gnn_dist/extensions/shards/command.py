"""``lightning-gnn-dist divide``: a saved graph or split in shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.options import Commands, add_partitioner, positive


def add_to(commands: Commands) -> None:
    """Add what may stand on the command line."""
    divide = commands.add_parser("divide", help="divide a saved graph or split of edges into shards, one for each rank")
    divide.add_argument("graph", type=Path, help="the directory of the graph, or of a split of its edges")
    divide.add_argument("output", type=Path, help="the directory of the shards, which must not exist")
    divide.add_argument("--parts", type=positive, metavar="P", required=True, help="how many shards")
    add_partitioner(divide)
    divide.set_defaults(does=f"{__name__}:run")


def run(options: argparse.Namespace) -> None:
    """Divide a saved graph or split into shards, so that no host needs all of it."""
    from lightning_gnn_dist.cli.cutting import partition_of, sizes_of, tell_of  # torch, which help does without
    from lightning_gnn_dist.extensions.links.link_split import LinkSplit
    from lightning_gnn_dist.extensions.shards.divide import save_shards
    from lightning_gnn_dist.extensions.shards.index import Bounds
    from lightning_gnn_dist.graph.graph import Graph
    from lightning_gnn_dist.graph.storage.store import holds_split

    whole = (LinkSplit if holds_split(options.graph) else Graph).open(options.graph)
    graph, name = (whole, "PartitionedDataModule") if isinstance(whole, Graph) else (whole.graph, "LinkDataModule")
    partition = partition_of(options, graph, options.parts)
    save_shards(whole, partition, options.output)
    print(f"{options.output}: {options.parts} shards of {sizes_of(partition)}.")
    tell_of(Bounds.read(options.output))
    print(f"Copy shares.json and shard r to the host of rank r, and train on {name}(path).")
