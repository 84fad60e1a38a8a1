"""What ``inspect --parts`` prints of the memory of ranks: the estimate that a fit compares with what is there."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.memory import Needs
from lightning_gnn_dist.homes.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.layers.budget import Host
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


def settings_of(options: argparse.Namespace) -> BatchSettings:
    """Return how batches are made that the options describe."""
    sampler = NeighborSampler(options.fanout)
    return BatchSettings(sampler, options.batch_size, None, Loading(), Evaluation(), GlobalBatching())


def of_ranks(graph: Graph, part: int, options: argparse.Namespace) -> str:
    """Return what ranks take of this host, given the bytes of the largest part."""
    needs, host = Needs.of_part(graph, part, settings_of(options)), Host.here(options.parts)
    return (
        f"Ranks, beside their libraries and the model, take about {needs.told(options.parts)}; {in_bytes(host.free)} "
        "are left here"
    )
