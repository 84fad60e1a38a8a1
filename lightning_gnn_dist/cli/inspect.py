"""``lightning-gnn-dist inspect``: report on a saved graph and its partitions, and advise."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from lightning_gnn_dist.checks import in_bytes, shown
from lightning_gnn_dist.cli.cutting import partitioner_of, tell_of
from lightning_gnn_dist.graph.graph import Graph, bytes_of_part
from lightning_gnn_dist.graph.graph_report import report_of
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.store import holds_shards, holds_split, shard_name
from lightning_gnn_dist.graph.user_ids import class_names
from lightning_gnn_dist.names import extension, offered
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.partition_report import advice
from lightning_gnn_dist.wire.memory import free_bytes

FANOUT, BATCH_SIZE = (15, 10), 1024  # of the batches whose memory is told


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    if options.check:
        _check(options.graph)
        return
    if holds_shards(options.graph):
        _tell_of_shards(options.graph, asks=options.parts is not None)
        return
    graph = Graph.open(options.graph)
    print(report_of(graph))
    for kind in graph.types.node_types:
        if names := class_names(options.graph, kind):
            print(f"labels of {kind or 'nodes'}: {shown(names)}, numbered from 0")
    if holds_split(options.graph):
        held = extension("split of edges").open(options.graph).edges.items()
        counts = ", ".join(f"{edges.shape[1]:,} {name}" for name, edges in held)
        print(f"The edges are those to train on; held back beside them: {counts}")
    for name in options.partitioner if options.parts else ():
        _inspect(graph, partitioner_of(name, options, graph), options)


def _tell_of_shards(path: Path, *, asks: bool) -> None:
    """Print how a graph is divided."""
    if asks:
        raise ValueError(
            f"{path} holds shards: --check reads them; parts are those of the whole graph, before it is divided."
        )
    bounds = extension("index of shards").Bounds.read(path)
    sizes = bounds.nodes.diff()
    print(f"{path}: {bounds.num_shards} shards of {int(sizes.min()):,} to {int(sizes.max()):,} nodes.")
    tell_of(bounds)


def _check(path: Path) -> None:
    """Read all files of a saved graph, or of all shards that are on this host."""
    bounds = extension("index of shards").Bounds.read(path) if holds_shards(path) else None
    shares = [path / shard_name(index) for index in range(bounds.num_shards)] if bounds else []
    there = [index for index, folder in enumerate(shares) if folder.is_dir()]
    for index in there:
        extension("index of shards").Shard.open(path, index)
        _verify(shares[index])
    if bounds is None:
        _verify(path)
        (extension("split of edges") if holds_split(path) else Graph).open(path)
    elif len(there) < bounds.num_shards:
        print(f"{path}: {bounds.num_shards - len(there)} of {bounds.num_shards} shards are not on this host.")


def _verify(path: Path) -> None:
    unknown = store.verify(path)
    if not unknown:
        print(f"{path}: all arrays are what was saved.")
        return
    print(
        f"{path}: {', '.join(unknown)} were saved without a checksum, by an older release. Edges were looked at; to "
        "have checksums of all, save the graph again."
    )


def _inspect(graph: Graph, partitioner: Partitioner, options: argparse.Namespace) -> None:
    partition = cached_partition(graph, partitioner, options.parts, options.seed)
    report = partition.report(graph)
    print(f"\n{partitioner}\n{report}")
    edges = torch.bincount(partition.assignment, graph.degrees().double(), partition.num_parts).long()
    alone = bytes_of_part(graph, report.nodes, report.inside_edges)
    with_halo = bytes_of_part(graph, report.nodes + report.halo_nodes, edges)
    print(
        f"RAM for a part: {in_bytes(float(alone.double().mean()))} in the mean, {in_bytes(int(alone.max()))} at most; "
        f"with Halo(1), {in_bytes(float(with_halo.double().mean()))} in the mean, {in_bytes(int(with_halo.max()))} at "
        f"most; the whole graph takes {in_bytes(graph.num_bytes)}"
    )
    print(_of_ranks(graph, int(alone.max()), options.parts))
    print(advice(graph, report))


def _of_ranks(graph: Graph, part: int, num_parts: int) -> str:
    """Return what ranks on this host take, given the bytes of the largest part."""
    # PyG takes seconds to import, and others need none.
    from lightning_gnn_dist.homes.settings import BatchSettings, Evaluation, GlobalBatching, Loading
    from lightning_gnn_dist.sampling.neighbor import NeighborSampler

    free = f"{in_bytes(free_bytes())} are left here"
    if (needs := offered("memory of a fit")) is None:
        return free
    settings = BatchSettings(NeighborSampler(list(FANOUT)), BATCH_SIZE, None, Loading(), Evaluation(), GlobalBatching())
    batches = f"batches have {BATCH_SIZE:,} seeds and draw {' and '.join(map(str, FANOUT))} neighbours"
    told = needs.of_part(graph, part, settings).told(num_parts)
    return f"Ranks, beside their libraries and the model, take about {told}, if {batches}; {free}"
