"""``lightning-gnn-dist reorder``: a saved graph chunk by chunk, so that some chunks at a time are read fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.options import Commands, add_partitioner, check_free, memory, positive


def add_to(commands: Commands) -> None:
    """Add what may stand on the command line."""
    reorder = commands.add_parser(
        "reorder", help="write a saved graph chunk by chunk, to train on some chunks of it at a time"
    )
    reorder.add_argument("graph", type=Path, help="the directory of the graph")
    reorder.add_argument("output", type=Path, help="the directory to write")
    reorder.add_argument("--chunks", type=positive, default=512, metavar="C", help="how many chunks (default: 512)")
    add_partitioner(reorder)
    reorder.add_argument(
        "--memory", type=memory, metavar="GB", help="RAM that copying takes, beside 40 bytes a node (default: 2)"
    )
    reorder.add_argument("--overwrite", action="store_true", help="replace a saved graph")
    reorder.set_defaults(does=f"{__name__}:run")


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    from lightning_gnn_dist.cli.cutting import partition_of, sizes_of  # torch, which help does without
    from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph
    from lightning_gnn_dist.graph.graph import Graph
    from lightning_gnn_dist.graph.storage.store import check_target, holds_split
    from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY

    if holds_split(options.graph):
        raise ValueError(f"{options.graph} holds a split of edges, and a graph is needed: reorder that one.")
    check_free(options.output, overwrite=options.overwrite)
    check_target(options.output, overwrite=options.overwrite)
    graph = Graph.open(options.graph)
    partition = partition_of(options, graph, options.chunks)
    how = {"memory_bytes": options.memory or DEFAULT_MEMORY, "overwrite": options.overwrite}
    reorder_graph(graph, partition, options.output, **how)
    print(f"{options.output}: {options.chunks} chunks of {sizes_of(partition)}.")
