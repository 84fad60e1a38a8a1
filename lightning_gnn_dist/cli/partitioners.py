"""Partitioners by their names on the command line."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner, is_available
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner


def partitioner_of(name: str | None, options: argparse.Namespace) -> Partitioner:
    """The partitioner of that name, or the default one, with the settings on the command line."""
    if name is None and not is_available():
        return default_partitioner()
    if name in (None, "metis"):
        return MetisPartitioner(balance=options.balance)
    if name == "supernodes":
        return SuperNodePartitioner(options.supernodes)
    if name == "streaming-supernodes":
        return SuperNodePartitioner(options.supernodes, StreamingPartitioner())
    return RandomPartitioner() if name == "random" else StreamingPartitioner()


def check_balance(options: argparse.Namespace) -> None:
    """Refuse ``--balance`` for a partitioner that cannot follow it."""
    if options.balance != "nodes" and options.partitioner not in (None, "metis"):
        raise ValueError(
            f"--balance {options.balance} is for --partitioner metis, and {options.partitioner} evens out nodes: "
            "leave one of the two out."
        )
