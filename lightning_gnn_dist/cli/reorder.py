"""``lightning-gnn-dist reorder``: write a saved graph chunk by chunk, so that some chunks at a time are read fast."""

from __future__ import annotations

import argparse
from importlib import import_module

from lightning_gnn_dist.cli.partitioners import partition_of, sizes_of
from lightning_gnn_dist.cli.values import check_free
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.store import check_target, holds_split
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY

REORDER = "lightning_gnn_dist.extensions.larger_than_memory.reorder"


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        if holds_split(options.graph):
            raise ValueError(f"{options.graph} holds a split of edges, and a graph is needed: reorder that one.")
        check_free(options.output, overwrite=options.overwrite)
        check_target(options.output, overwrite=options.overwrite)
        graph = Graph.open(options.graph)
        partition = partition_of(options, graph, options.chunks)
        memory = options.memory or DEFAULT_MEMORY
        import_module(REORDER).reorder_graph(
            graph, partition, options.output, memory_bytes=memory, overwrite=options.overwrite
        )
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist reorder: {error}") from error
    print(f"{options.output}: {options.chunks} chunks of {sizes_of(partition)}.")
