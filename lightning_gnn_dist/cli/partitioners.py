"""Partitioners by their names on the command line."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.advice import SUPERNODES_PER_PART
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner


def partitioner_of(name: str, options: argparse.Namespace, graph: Graph) -> Partitioner:
    """The partitioner of that name, with the settings on the command line."""
    if name == "metis":
        return MetisPartitioner(balance=options.balance)
    if name == "supernodes":
        number = options.supernodes or min(SUPERNODES_PER_PART * options.parts, graph.num_nodes)
        return SuperNodePartitioner(number)
    return RandomPartitioner() if name == "random" else StreamingPartitioner()
