"""``lightning-gnn-dist inspect``: what a saved graph is like, what cutting it does, and what follows."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.values import Commands, in_bytes, positive
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.report import GraphReport
from lightning_gnn_dist.partition.advice import SUPERNODES_PER_PART, advise, bytes_per_part
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner

PARTITIONERS = ("metis", "supernodes", "random", "streaming")


def add_to(commands: Commands) -> None:
    """Declare the command and its options."""
    inspect = commands.add_parser("inspect", help="report on a saved graph and on partitions of it")
    inspect.add_argument("graph", type=Path, help="the directory of the graph")
    inspect.add_argument("--parts", type=positive, metavar="P", help="cut it into so many parts")
    inspect.add_argument(
        "--partitioner", nargs="+", choices=PARTITIONERS, default=["metis"], help="how (default: metis)"
    )
    inspect.add_argument("--balance", choices=("nodes", "train"), default="nodes", help="what METIS evens out")
    inspect.add_argument(
        "--supernodes", type=positive, metavar="N", help=f"clusters (default: {SUPERNODES_PER_PART} for each part)"
    )
    inspect.add_argument("--seed", type=int, default=0, help="decides the partition (default: 0)")
    inspect.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        graph = Graph.open(options.graph)
        print(GraphReport.of(graph))
        for name in options.partitioner if options.parts else ():
            _inspect(graph, _partitioner(name, options, graph), options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist inspect: {error}") from error


def _inspect(graph: Graph, partitioner: Partitioner, options: argparse.Namespace) -> None:
    report = cached_partition(graph, partitioner, options.parts, options.seed).report(graph)
    ram = bytes_per_part(graph, report)
    print(f"\n{partitioner}\n{report}")
    print(
        f"RAM for a part: {in_bytes(float(ram.double().mean()))} in the mean, {in_bytes(int(ram.max()))} at most; "
        f"the whole graph takes {in_bytes(graph.num_bytes)}"
    )
    for sentence in advise(graph, report).sentences:
        print(f"- {sentence}")


def _partitioner(name: str, options: argparse.Namespace, graph: Graph) -> Partitioner:
    if name == "metis":
        return MetisPartitioner(balance=options.balance)
    if name == "supernodes":
        number = options.supernodes or min(SUPERNODES_PER_PART * options.parts, graph.num_nodes)
        return SuperNodePartitioner(number)
    return RandomPartitioner() if name == "random" else StreamingPartitioner()
