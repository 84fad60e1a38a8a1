"""``lightning-gnn-dist prepare``: turn the files of a graph into a saved graph."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from lightning_gnn_dist.cli.first_batch import compile_for, is_compiled
from lightning_gnn_dist.cli.values import in_bytes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import report_of
from lightning_gnn_dist.prepare.describe import Prepared
from lightning_gnn_dist.prepare.files.raw import SPLITS, RawGraph, Source
from lightning_gnn_dist.prepare.files.sources import find_source
from lightning_gnn_dist.prepare.files.typed_source import HeteroFile, TypedSource
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables, is_typed
from lightning_gnn_dist.prepare.one_shard import OneShard
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY, Preparation
from lightning_gnn_dist.prepare.shard import shard_name

IN_MEMORY = {".pt", ".pth", ".npz"}


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    try:
        _check_shard(options)
        if options.shard is None and options.out.exists() and not options.overwrite:
            raise FileExistsError(f"{options.out} exists already: choose another path, or add --overwrite.")
        in_memory = options.out_of_core is None and options.shard is None
        source = _typed_source(options) if in_memory else None
        if is_typed(options.source) or source is not None:
            _check_typed(options)
        elif options.time is not None or options.reverse:
            raise ValueError(
                "--time and --reverse are of graphs with types: a HeteroData, or a folder with folders nodes and edges."
            )
        if source is not None:
            _prepare_typed(source, options)
            _compile(options)
            return
        (_prepare if in_memory else _prepare_out_of_core)(options)
        _compile(options)
    except (ValueError, TypeError, OSError, NotImplementedError, MemoryError, ModuleNotFoundError) as error:
        raise SystemExit(f"lightning-gnn-dist prepare: {error}") from error


def _prepare(options: argparse.Namespace) -> None:
    source = find_source(options.source, nodes=options.nodes, drop=options.drop)
    _estimate(source, options)
    with _step("reading") as progress:
        raw = source.read(progress)
    if options.undirected:
        with _step("adding reverse edges"):
            raw = raw.undirected()
    if options.split:
        raw = raw.with_split(options.split, options.seed)
    with _step("sorting edges"):
        graph = raw.build(float_labels=options.float_labels)
    with _step("writing"):
        graph.save(options.out, overwrite=options.overwrite)
    arrays = [*graph.node_arrays, *graph.edge_arrays]
    splits = {
        name.removesuffix("_mask"): int(a.sum()) for name, a in graph.node_arrays.items() if name.endswith("_mask")
    }
    _summary(Prepared(graph.num_nodes, graph.num_edges, graph.num_bytes, arrays, splits), options)
    if not options.undirected and not _may_be_undirected(graph, raw):
        print("Not every edge has its reverse. If the graph is undirected, prepare it with --undirected.")


def _typed_source(options: argparse.Namespace) -> TypedSource | None:
    """What a graph with types is read from; None for a graph without."""
    if is_typed(options.source):
        return TypedTables.of(options.source, options.drop, options.time)
    if options.source.suffix in {".pt", ".pth"} and options.source.is_file():
        return HeteroFile.of(options.source, options.drop, options.time)
    return None


def _check_typed(options: argparse.Namespace) -> None:
    if options.undirected or options.nodes:
        raise ValueError(
            f"{options.source} holds several types: their nodes are known (no --nodes), and the reverse of an edge is "
            "of another type (--reverse, no --undirected)."
        )


def _prepare_typed(source: TypedSource, options: argparse.Namespace) -> None:
    num_edges, ram = (count * (1 + options.reverse) for count in (source.num_edges, source.needed_ram))
    of_nodes, of_edges = source.num_types
    print(
        f"{options.source}: {of_nodes} types of nodes, {num_edges:,} edges of {of_edges} types. Sorting them takes "
        f"{in_bytes(ram)} of RAM."
    )
    _say(source.headings)
    with _step("reading and sorting") as progress:
        settings = {"split": options.split, "seed": options.seed, "float_labels": options.float_labels}
        graph = source.read(progress, reverse=options.reverse, **settings)
    with _step("writing"):
        graph.save(options.out, overwrite=options.overwrite)
    print(f"{options.out}: {report_of(graph)}")


def _prepare_out_of_core(options: argparse.Namespace) -> None:
    preparation = _preparation(options)
    estimate = preparation.estimate()
    print(
        f"{options.source}: {estimate.num_edges:,} edges. {preparation.target} will take at most about "
        f"{in_bytes(estimate.stored_bytes)}, and making it {in_bytes(estimate.disk_bytes)} of disk, "
        f"{in_bytes(preparation.memory_bytes)} of RAM beside 24 bytes a node, and about "
        f"{estimate.seconds / 60:.1f} minutes."
    )
    _say(estimate.headings)
    with _stages() as on_progress:
        prepared = preparation.run(on_progress, overwrite=options.overwrite)
    _summary(prepared, options)


def _preparation(options: argparse.Namespace) -> Preparation:
    shard = None if options.shard is None else OneShard(options.shard, options.num_shards, options.assignment)
    return Preparation(
        options.source,
        options.out,
        shard,
        options.nodes,
        undirected=options.undirected,
        time=options.time,
        reverse=options.reverse,
        split=options.split,
        seed=options.seed,
        drop=tuple(options.drop),
        float_labels=options.float_labels,
        memory_bytes=options.out_of_core or DEFAULT_MEMORY,
    )


def _compile(options: argparse.Namespace) -> None:
    """Compile now what the first training would wait for, unless that was done before."""
    if options.shard is None and not is_compiled():
        with _step("compiling the loops that make batches, once for this version on this machine"):
            compile_for(options.out)


def _check_shard(options: argparse.Namespace) -> None:
    in_pieces = "--out-of-core" if options.shard is None else "--shard"
    if options.source.suffix in IN_MEMORY and not (options.out_of_core is None and options.shard is None):
        raise ValueError(
            f"{options.source} is read in memory alone: leave {in_pieces} out, or write its arrays to folders of .npy."
        )
    if (options.shard is None) != (options.num_shards is None):
        raise ValueError("--shard and --num-shards belong together: which shard, and of how many.")
    if options.assignment and options.shard is None:
        raise ValueError("--assignment says whose nodes a shard has: add --shard and --num-shards.")


def _estimate(source: Source, options: argparse.Namespace) -> None:
    stored, ram = (size(undirected=options.undirected) for size in (source.stored_bytes, source.needed_ram))
    folder = next(parent for parent in options.out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    print(
        f"{options.source}: {source.num_edges:,} edges. {options.out} will take about {in_bytes(stored)} "
        f"({in_bytes(free)} are free), and sorting its edges {in_bytes(ram)} of RAM."
    )
    _say(source.headings)
    if stored > free:
        raise OSError(f"{folder} has {in_bytes(free)} free, and {in_bytes(stored)} are needed: choose another disk.")
    if ram > (there := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        print(f"This machine has {in_bytes(there)} of RAM: --out-of-core sorts the edges on disk.")


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


@contextmanager
def _step(name: str) -> Iterator[Callable[[float], None]]:
    """Print the name of a step, the share of it that is done if known, and how long it took."""
    start, is_shown = time.perf_counter(), sys.stderr.isatty()

    def progress(share: float) -> None:
        if is_shown:
            print(f"\r{name} {share:4.0%}", end="", file=sys.stderr, flush=True)

    if is_shown:
        print(f"\r{name} ...", end="", file=sys.stderr, flush=True)
    yield progress
    print(f"\r{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def _stages() -> Iterator[Callable[[str, float], None]]:
    """The same as :func:`_step`, for work that names its own steps."""
    with ExitStack() as steps:
        shown: dict[str, Callable[[float], None]] = {}

        def progress(name: str, share: float) -> None:
            if name not in shown:
                steps.close()
                shown[name] = steps.enter_context(_step(name))
            shown[name](share)

        yield progress


def _summary(prepared: Prepared, options: argparse.Namespace) -> None:
    order = sorted(prepared.splits, key=lambda name: [*SPLITS, name].index(name))
    splits = ", ".join(f"{prepared.splits[name]:,} {name}" for name in order)
    out = options.out if options.shard is None else options.out / shard_name(options.shard)
    print(f"{out}: {prepared.num_nodes:,} nodes, {prepared.num_edges:,} edges, {in_bytes(prepared.num_bytes)}.")
    print(f"arrays: {', '.join(prepared.arrays)}; split: {splits or 'none'}.")
    if not any(name.endswith("train") for name in prepared.splits):
        print("There is no train_mask, and training needs one: --split 0.6 0.2 0.2, or a column called split.")


def _may_be_undirected(graph: Graph, raw: RawGraph) -> bool:
    """Whether every node sends as many edges as it receives, as in an undirected graph."""
    sent = torch.bincount(raw.edge_index[0].to(torch.int64), minlength=graph.num_nodes)
    return torch.equal(sent, graph.degrees())
