"""``lightning-gnn-dist inspect``: report on a saved graph and its partitions, and advise."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_gnn_dist.boundary.auto import SMALL, Auto, Cost, allowed_by, choose
from lightning_gnn_dist.boundary.boundary import Halo
from lightning_gnn_dist.boundary.prices import Price, prices, short_name
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.cli.inspecting.columns import in_columns
from lightning_gnn_dist.cli.partitioners import partitioner_of
from lightning_gnn_dist.data.edges.held import holds_split
from lightning_gnn_dist.data.links import LinkSplit
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import report_of
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.store import shard_name
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.partition.advice import advise, bytes_per_part
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.partition_report import PartitionReport
from lightning_gnn_dist.prepare.shard import Bounds, Shard, holds_shards


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        if (options.graph is None) == (options.plan is None):
            raise ValueError(
                "name the directory of a graph, or one that is not there yet, --plan nodes=1e9 edges=2e10."
            )
        if options.plan:
            print(_drawing("plan").planned(options))
            return
        if options.check:
            _check(options.graph)
            return
        if holds_shards(options.graph):
            _tell_of_shards(options.graph, asks=options.parts is not None or _asks_more(options))
            return
        graph = Graph.open(options.graph)
        print(report_of(graph))
        if holds_split(options.graph):
            held = LinkSplit.open(options.graph).edges.items()
            counts = ", ".join(f"{edges.shape[1]:,} {name}" for name, edges in held)
            print(f"The edges are those to train on; held back beside them: {counts}")
        if options.cache:
            print(_drawing("cache").fetched_from_files(graph, options))
        if options.sweep:
            print(_drawing("sweep").cost_of_sweep(graph, options))
        if options.nodes:
            print(_drawing("nodes").cost_of_nodes(graph, options))
        if options.device:
            print(_drawing("device").placed_on_device(graph, options))
        for name in (options.partitioner or [None]) if options.parts else ():
            _inspect(graph, partitioner_of(name, options, graph), options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lightning-gnn-dist inspect: {error}") from error


def _asks_more(options: argparse.Namespace) -> bool:
    return bool(options.cache or options.device or options.nodes or options.sweep)


def _tell_of_shards(path: Path, *, asks: bool) -> None:
    """Print how a graph is divided."""
    if asks:
        raise ValueError(
            f"{path} holds shards: --check reads them; figures and prices are those of the whole graph, before it is "
            "divided."
        )
    bounds = Bounds.read(path)
    sizes = bounds.nodes.diff()
    print(f"{path}: {bounds.num_shards} shards of {int(sizes.min()):,} to {int(sizes.max()):,} nodes.")
    for about in (bounds.types if have_names(bounds.types) else None, bounds.links):
        if about is not None:
            print(about)


def _check(path: Path) -> None:
    """Read all files of a saved graph, or of all shards that are on this host."""
    bounds = Bounds.read(path) if holds_shards(path) else None
    shares = [path / shard_name(index) for index in range(bounds.num_shards)] if bounds else []
    there = [index for index, folder in enumerate(shares) if folder.is_dir()]
    for index in there:
        Shard.open(path, index)
        _verify(shares[index])
    if bounds is None:
        _verify(path)
        (LinkSplit if holds_split(path) else Graph).open(path)
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
    ram = bytes_per_part(graph, report)
    print(
        f"RAM for a part: {in_bytes(float(ram.double().mean()))} in the mean, {in_bytes(int(ram.max()))} at most; "
        f"the whole graph takes {in_bytes(graph.num_bytes)}"
    )
    print(_drawing("memory").of_ranks(graph, int(ram.max()), options))
    print(_prices(graph, partition, report, options))
    if options.cache:
        print(_drawing("cache").fetched_from_shards(graph, partition, report, options))
    for sentence in advise(graph, report).sentences:
        print(f"- {sentence}")


def _drawing(option: str) -> Any:
    """Return the module of an option that draws batches, which takes PyG and seconds to import: others need none."""
    return import_module(f"lightning_gnn_dist.cli.inspecting.{option}")


def _prices(graph: Graph, partition: Partition, report: PartitionReport, options: argparse.Namespace) -> str:
    """Return a table of what each boundary costs."""
    rows = [("boundary", "rows of others", "RAM of the part", "work", "sent in a step", "seconds", "lost")]
    found = list(prices(graph, partition, report, options.layers, options.width))
    for price in found:
        seconds = price.bytes_sent * 8 / (options.bandwidth * 1e9)
        sent = in_bytes(price.bytes_sent) if price.bytes_sent else "nothing"
        sent += " a round" if price.bytes_sent and price.per == "round" else ""
        figures = f"{price.rows:,}", in_bytes(price.bytes_held), f"{price.times:.1f}", sent, f"{seconds:.2g}"
        rows.append((short_name(price.boundary), *figures, price.loses))
    layers = "1 layer" if options.layers == 1 else f"{options.layers} layers"
    model = f"{layers} of width {options.width} and {options.bandwidth:g} Gbit/s"
    title = (
        f"The edges between parts, for {model}, of the part that pays most; the work is that of whole parts with "
        "layers(), of all ranks together, in times of one process:"
    )
    return "\n".join([title, *in_columns(rows), _of_auto(found, options.parts)])


def _of_auto(found: Sequence[Price], num_parts: int) -> str:
    """Return what ``boundary="auto"`` would choose if all ranks ran on this host."""
    allowed = allowed_by(Auto(), num_parts)
    halos = [
        Cost(price.boundary, price.bytes_held, price.times, price.work <= SMALL)
        for price in found
        if isinstance(price.boundary, Halo)
    ]
    drawn, whole = (
        short_name(choose(halos, of_kind, exchanges=False).boundary)
        for of_kind in (allowed._replace(times=math.inf), allowed)
    )
    which = (
        drawn if drawn == whole else f"{drawn} with batches of few seeds, and {whole} with whole parts, for the work"
    )
    return (
        f'boundary="auto" is {which}: {num_parts} ranks on this host have room for parts of {in_bytes(allowed.bytes)}'
    )
