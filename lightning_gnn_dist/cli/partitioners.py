"""Partitioners by their names on the command line."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.cli.values import positive
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.advice import SUPERNODES_PER_PART
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner

NAMES = ("metis", "supernodes", "random", "streaming")


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare the options of all partitioners."""
    command.add_argument("--balance", choices=("nodes", "train"), default="nodes", help="what METIS evens out")
    command.add_argument(
        "--supernodes", type=positive, metavar="N", help=f"clusters (default: {SUPERNODES_PER_PART} for each part)"
    )
    command.add_argument("--seed", type=int, default=0, help="decides the partition (default: 0)")


def partitioner_of(name: str, options: argparse.Namespace, graph: Graph) -> Partitioner:
    """The partitioner of that name, with the settings on the command line."""
    if name == "metis":
        return MetisPartitioner(balance=options.balance)
    if name == "supernodes":
        number = options.supernodes or min(SUPERNODES_PER_PART * options.parts, graph.num_nodes)
        return SuperNodePartitioner(number)
    return RandomPartitioner() if name == "random" else StreamingPartitioner()
