"""``lightning-gnn-dist shop``: write the tables of a made-up shop."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.cli.options import Commands, positive


def add_to(commands: Commands) -> None:
    """Add what may stand on the command line."""
    shop = commands.add_parser("shop", help="write the tables of a made-up shop, and a task, to try databases on")
    shop.add_argument("out", type=Path, help="the folder to write, which must not exist")
    shop.add_argument("--customers", type=positive, default=3_000, help="how many (default: 3000)")
    shop.add_argument("--seed", type=int, default=0, help="decides everything random (default: 0)")
    shop.set_defaults(does=f"{__name__}:run")


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    from lightning_gnn_dist.extensions.databases.shop import write_shop  # NumPy, which help does without

    write_shop(options.out, options.customers, seed=options.seed)
    print(f"{options.out} holds four tables, and the tasks stays and buys.")
    print(f"Go on: lightning-gnn-dist prepare {options.out} {options.out}_graph")
