"""The command ``lightning-gnn-dist``: run the subcommand that is named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_gnn_dist.cli import demo, divide, elastic, inspect, prepare, report, train


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script."""
    command = (sys.argv[1:] if arguments is None else arguments)[:1]
    if command and command[0] in train.COMMANDS:
        train.run(arguments)
        return
    options = _parser().parse_args(arguments)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=train.PROGRAM, description="Train graph neural networks on partitioned graphs."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (demo, prepare, inspect, divide, elastic, report):
        command.add_to(commands)
    for name, purpose in train.COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)  # listed here, parsed by Lightning
    return parser
