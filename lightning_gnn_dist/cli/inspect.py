"""``lightning-gnn-dist inspect``: what a saved graph is like, what cutting it does, and what follows."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.partitioners import NAMES, add_options, partitioner_of
from lightning_gnn_dist.cli.values import Commands, in_bytes, positive
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.report import GraphReport
from lightning_gnn_dist.partition.advice import advise, bytes_per_part, peak_bytes
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition


def add_to(commands: Commands) -> None:
    """Declare the command and its options."""
    inspect = commands.add_parser("inspect", help="report on a saved graph and on partitions of it")
    inspect.add_argument("graph", type=Path, help="the directory of the graph")
    inspect.add_argument("--parts", type=positive, metavar="P", help="cut it into so many parts")
    inspect.add_argument("--partitioner", nargs="+", choices=NAMES, default=["metis"], help="how (default: metis)")
    add_options(inspect)
    inspect.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        graph = Graph.open(options.graph)
        print(GraphReport.of(graph))
        for name in options.partitioner if options.parts else ():
            _inspect(graph, partitioner_of(name, options, graph), options)
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
    print(f"A rank takes at most about {in_bytes(peak_bytes(graph, report))}, beside its libraries and the model")
    for sentence in advise(graph, report).sentences:
        print(f"- {sentence}")
