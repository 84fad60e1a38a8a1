"""The command ``lightning-gnn-dist``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from lightning_gnn_dist.demo import as_table, run_demo
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.launcher import Launcher
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    options = _parser().parse_args(arguments)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-gnn-dist", description="Train graph neural networks on partitioned graphs."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="train on a built-in graph with a few processes, on the CPU")
    demo.add_argument("--ranks", type=_positive, default=2, help="processes (default: 2)")
    demo.add_argument("--rounds", type=_positive, default=10, help="meetings (default: 10)")
    demo.add_argument("--steps", type=_positive, default=16, help="local steps in a round (default: 16)")
    demo.add_argument("--nodes", type=_positive, default=20_000, help="nodes of the graph (default: 20000)")
    demo.set_defaults(run=_demo)
    elastic = commands.add_parser("elastic", help="start ranks that may die and come back, and their lighthouse")
    elastic.add_argument("--ranks", type=_positive, required=True, help="processes on this machine")
    elastic.add_argument("--restarts", type=int, default=0, help="start dead ranks again, so often in all (default: 0)")
    elastic.add_argument("--heartbeat", type=float, default=5.0, help="seconds of silence of a dead rank (default: 5)")
    elastic.add_argument("--grace", type=float, default=30.0, help="seconds to end in on SIGTERM (default: 30)")
    elastic.add_argument("command", nargs=argparse.REMAINDER, help="-- python train.py ...")
    elastic.set_defaults(run=_elastic)
    return parser


def _demo(options: argparse.Namespace) -> None:
    if options.ranks < 2:
        raise SystemExit("--ranks must be at least 2: the demo compares several processes with one.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    graph = communities(options.nodes)
    outcomes = run_demo(graph, ranks=options.ranks, rounds=options.rounds, steps=options.steps)
    if outcomes is None:
        return
    print(f"\n{graph}")
    for partitioner in (MetisPartitioner(), RandomPartitioner()):
        print(f"\n{partitioner}\n{partitioner(graph, options.ranks, 0).report(graph)}")
    print(f"\n{as_table(outcomes)}")


def _elastic(options: argparse.Namespace) -> None:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise SystemExit("Say what each rank runs: lightning-gnn-dist elastic --ranks 4 -- python train.py")
    tell = lambda line: print(f"[elastic] {line}", flush=True)  # noqa: E731
    raise SystemExit(Launcher(command, options.ranks, options.restarts, options.heartbeat, options.grace, tell).run())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
