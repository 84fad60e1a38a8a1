"""``lightning-gnn-dist shop``: write the tables of a made-up shop."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.prepare.databases.shop import write_shop


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        write_shop(options.out, options.customers, seed=options.seed)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist shop: {error}") from error
    print(f"{options.out} holds four tables, and the tasks stays and buys.")
    print(f"Go on: lightning-gnn-dist prepare {options.out} {options.out}_graph")
