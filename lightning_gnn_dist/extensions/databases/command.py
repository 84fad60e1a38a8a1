"""``lightning-gnn-dist shop``: write the tables of a made-up shop."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.values import Commands, positive


def add_to(commands: Commands) -> None:
    """Add what may stand on the command line."""
    shop = commands.add_parser("shop", help="write the tables of a made-up shop, and a task, to try databases on")
    shop.add_argument("out", type=Path, help="the folder to write, which must not exist")
    shop.add_argument("--customers", type=positive, default=3_000, help="how many (default: 3000)")
    shop.add_argument("--seed", type=int, default=0, help="decides everything random (default: 0)")
    shop.set_defaults(module=__name__)


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    from lightning_gnn_dist.extensions.databases.shop import write_shop  # NumPy, which help does without

    try:
        write_shop(options.out, options.customers, seed=options.seed)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist shop: {error}") from error
    print(f"{options.out} holds four tables, and the tasks stays and buys.")
    print(f"Go on: lightning-gnn-dist prepare {options.out} {options.out}_graph")
