"""``lightning-gnn-dist demo``: train on a small built-in graph, and report on it."""

from __future__ import annotations

import argparse
import logging

from lightning_gnn_dist.cli.demo_run import as_table, run_demo
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.random import RandomPartitioner


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    if options.ranks < 2:
        raise SystemExit("--ranks must be at least 2: the demo compares several processes with one.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        graph = communities(options.nodes)
    except ValueError as error:
        raise SystemExit(f"lightning-gnn-dist demo: {error}") from error
    outcomes = run_demo(graph, ranks=options.ranks, rounds=options.rounds, steps=options.steps)
    if outcomes is None:
        return
    print(f"\n{graph}")
    for partitioner in (default_partitioner(), RandomPartitioner()):
        print(f"\n{partitioner}\n{partitioner(graph, options.ranks, 0).report(graph)}")
    print(f"\n{as_table(outcomes)}")
