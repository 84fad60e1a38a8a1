"""What ``inspect --cache`` prints: what training would fetch from files or from other shards."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.forecast import Elsewhere, Forecast, forecast
from lightning_gnn_dist.batches.ahead.merged_reads import MergedReads
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.placing.memory_plan import wide_arrays
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of, edge_positions
from lightning_gnn_dist.graph.storage.mapped import all_maps
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.partition_report import PartitionReport
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

_MOST_BATCHES = 512  # that are drawn, some seconds' work
_BYTES_OF_AN_ID = 4

Arrays = Mapping[str, Tensor]


def fetched_from_files(graph: Graph, options: argparse.Namespace) -> str:
    """Return what one process would read of the graph's files in a pass."""
    maps, types = all_maps(), graph.types
    wide = [wide_arrays(arrays) for arrays in types.node_arrays.values()]
    if not any(wide):
        raise ValueError(f"{options.graph} has no features that --cache could hold, of at least 32 bytes a node.")

    def of_type(arrays: Arrays, first: int) -> Elsewhere:
        reads = [MergedReads(array, maps) for array in arrays.values() if len(array)]
        return Elsewhere(
            bytes_per_row(arrays),
            lambda ids: degrees_of(graph.indptr, ids + first),
            lambda ids: sum(each.bytes_of(ids) for each in reads),
        )

    found = [of_type(*each) for each in zip(wide, types.offsets, strict=False)]
    return _report("from its files, one process", graph, None, found, options)


def fetched_from_shards(
    graph: Graph, partition: Partition, report: PartitionReport, options: argparse.Namespace
) -> str:
    """Return what a rank would fetch of other shards in a pass: that of the part with most neighbours outside."""
    part = int(report.halo_nodes.argmax())
    is_own = partition.assignment == part
    senders = graph.indices[edge_positions(graph.indptr, is_own.nonzero().view(-1))]
    edges_from = torch.bincount(senders.to(torch.int64), minlength=graph.num_nodes)

    def of_type(arrays: Arrays, first: int) -> Elsewhere:
        width = bytes_per_row(arrays) + _BYTES_OF_AN_ID
        return Elsewhere(width, lambda ids: edges_from[ids + first], lambda ids: len(ids) * width)

    found = [of_type(*each) for each in zip(graph.types.node_arrays.values(), graph.types.offsets, strict=False)]
    return _report(f"from other shards, part {part}", graph, is_own, found, options)


def _report(
    where: str, graph: Graph, is_near: Tensor | None, types: Sequence[Elsewhere], options: argparse.Namespace
) -> str:
    seeds = graph.split("train")
    seeds = seeds if is_near is None else seeds[is_near[seeds]]
    if not len(seeds):
        raise ValueError(f"{options.graph} has no training nodes there: --cache draws batches around them.")
    sizes = {"batch_size": options.batch_size, "bulk_size": Loading().bulk_size, "most_batches": _MOST_BATCHES}
    found = forecast(graph, NeighborSampler(options.fanout), seeds, is_near, [0, *options.cache], types, **sizes)
    fanout = ", ".join(map(str, options.fanout))
    title = f"Rows that a pass would fetch {where}, with batches of {options.batch_size} and fan-out {fanout}"
    title += f" ({found.drawn} batches drawn, {found.batches} in a pass):"
    return "\n".join([title, *_lines(found, options)])


def _lines(found: Forecast, options: argparse.Namespace) -> Iterator[str]:
    yield f"  without a cache: {found.rows:,.0f} rows, {in_bytes(found.num_bytes[0])}"
    for size, held, read in zip(options.cache, found.held[1:], found.num_bytes[1:], strict=True):
        yield f"  cache of {in_bytes(size)}: holds {held:.0%} of them, {in_bytes(read)}"
