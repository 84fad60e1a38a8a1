"""What ``inspect --cache`` prints: what training would fetch from files or from other shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.forecast import Forecast, forecast
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.placing.memory_plan import wide_arrays
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, edge_positions
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.partition_report import PartitionReport
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

_MOST_BATCHES = 512  # that are drawn, some seconds' work
_BYTES_OF_AN_ID = 4


def fetched_from_files(graph: Graph, options: argparse.Namespace) -> str:
    """Return what one process would read of the graph's files in a pass."""
    width = bytes_per_row(wide_arrays(graph.node_arrays))
    if not width:
        raise ValueError(f"{options.graph} has no features that --cache could hold, of at least 32 bytes a node.")
    return _report("from its files, one process", graph, None, width, graph.degrees(), options)


def fetched_from_shards(
    graph: Graph, partition: Partition, report: PartitionReport, options: argparse.Namespace
) -> str:
    """Return what a rank would fetch of other shards in a pass: that of the part with most neighbours outside."""
    part = int(report.halo_nodes.argmax())
    is_own = partition.assignment == part
    width = bytes_per_row(graph.node_arrays) + _BYTES_OF_AN_ID
    senders = graph.indices[edge_positions(graph.indptr, is_own.nonzero().view(-1))]
    edges_from = torch.bincount(senders.to(torch.int64), minlength=graph.num_nodes)
    return _report(f"from other shards, part {part}", graph, is_own, width, edges_from, options)


def _report(
    where: str, graph: Graph, is_near: Tensor | None, width: int, num_edges: Tensor, options: argparse.Namespace
) -> str:
    seeds = graph.split("train")
    seeds = seeds if is_near is None else seeds[is_near[seeds]]
    if not len(seeds):
        raise ValueError(f"{options.graph} has no training nodes there: --cache draws batches around them.")
    rooms = [min(size // width, graph.num_nodes) for size in options.cache]
    sizes = {"batch_size": options.batch_size, "bulk_size": Loading().bulk_size, "most_batches": _MOST_BATCHES}
    sampler = NeighborSampler(options.fanout)
    found = forecast(graph, sampler, seeds, is_near, rooms, num_edges.__getitem__, **sizes)
    fanout = ", ".join(map(str, options.fanout))
    title = f"Rows that a pass would fetch {where}, with batches of {options.batch_size} and fan-out {fanout}"
    title += f" ({found.drawn} batches drawn, {found.batches} in a pass):"
    return "\n".join([title, *_lines(found, width, options)])


def _lines(found: Forecast, width: int, options: argparse.Namespace) -> Iterator[str]:
    yield f"  without a cache: {found.rows:,.0f} rows, {in_bytes(found.rows * width)}"
    for size, held in zip(options.cache, found.held, strict=True):
        yield f"  cache of {in_bytes(size)}: holds {held:.0%} of them, {in_bytes((1 - held) * found.rows * width)}"
