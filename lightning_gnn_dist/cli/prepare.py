"""``lightning-gnn-dist prepare``: turn the files of a graph into a saved graph."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import torch

from lightning_gnn_dist.checks import aligned, in_bytes
from lightning_gnn_dist.cli.options import check_free
from lightning_gnn_dist.graph.storage.npy import NpyFile
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.prepare.arrays import SPLITS
from lightning_gnn_dist.prepare.journal import Prepared
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY, Choice, Portion, Preparation, as_files

SENDERS_AT_ONCE = 1 << 22


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    shard = _shard(options)
    source = options.source[0] if len(options.source) == 1 else options.source
    given = {"source": source, "nodes": options.nodes}
    with ExitStack() as ends:
        with _stages() as on_progress:
            of_files = as_files(options.out, given, options.task, on_progress, is_whole=shard is None)
            files = ends.enter_context(of_files)
        preparation = _preparation(options, files, shard)
        if _is_of_torchrun() and preparation.target.exists() and not options.overwrite:
            print(f"{preparation.target} is there. To make it anew, add --overwrite, or remove it.")
            return
        check_free(preparation.target, overwrite=options.overwrite)
        _tell_plan(preparation)
        with _stages() as on_progress:
            prepared = preparation.run(on_progress, overwrite=options.overwrite, on_columns=_tell_columns)
        _summary(prepared, preparation)


def _preparation(options: argparse.Namespace, files: Mapping[str, Path], shard: Portion | None) -> Preparation:
    return Preparation(
        files["source"],
        options.out,
        shard,
        files.get("nodes"),
        undirected=options.undirected,
        time=options.time,
        reverse=options.reverse,
        split=options.split,
        seed=options.seed,
        choice=Choice(tuple(options.drop), {name: kind for kind, *names in options.kinds for name in names}),
        float_labels=options.float_labels,
        memory_bytes=options.memory or DEFAULT_MEMORY,
    )


def _shard(options: argparse.Namespace) -> Portion | None:
    """Which shard to make, if any: of a rank of torchrun the one of its number."""
    if _is_of_torchrun() and (options.shard is not None or options.num_shards is not None):
        raise ValueError("Ranks of torchrun make the shards of their numbers: leave --shard and --num-shards out.")
    if (options.shard is not None) != (options.num_shards is not None):
        raise ValueError("--shard and --num-shards belong together: which shard, and of how many.")
    index, num_shards = options.shard, options.num_shards
    if _is_of_torchrun():
        index, num_shards = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if index is not None:
        return cast(Portion, extension("one shard")(index, num_shards, options.assignment))
    if options.assignment:
        raise ValueError("--assignment says whose nodes a shard has: add --shard and --num-shards.")
    return None


def _is_of_torchrun() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1"


def _tell_plan(preparation: Preparation) -> None:
    print(f"{preparation.source} is read as {preparation.plan.layout}.")
    for line in preparation.plan.headings:
        print(line)


def _tell_columns(told: Sequence[tuple[str, str, str]]) -> None:
    """Print what columns become that are more than numbers."""
    if told:
        print("\n".join(aligned([("table", "column", "becomes"), *told])))
        print("Others are numbers. To choose: --drop NAME, or --as category|number|time|text NAME.")


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


def _summary(prepared: Prepared | None, preparation: Preparation) -> None:
    if prepared is None:
        print(f"{preparation.target}: was written before, when the command was stopped.")
        return
    order = sorted(prepared.splits, key=lambda name: [*SPLITS, name].index(name))
    splits = ", ".join(f"{prepared.splits[name]:,} {name}" for name in order)
    size = f"{prepared.num_nodes:,} nodes, {prepared.num_edges:,} edges, {in_bytes(prepared.num_bytes)}"
    if prepared.types is not None and preparation.shard is None:
        from lightning_gnn_dist.graph.graph_report import report_of_types  # a graph without types needs none of it

        indptr, indices = (
            torch.from_numpy(map_npy(preparation.target / f"{name}.npy")) for name in ("indptr", "indices")
        )
        print(f"{preparation.target}: {report_of_types(indptr, indices, prepared.types)}")
        for line in () if prepared.types.tables is None else prepared.types.tables.lines:
            print(line)
        return
    print(f"{preparation.target}: {size}.")
    print(f"arrays: {', '.join(prepared.arrays)}; split: {splits or 'none'}.")
    if not any(name.endswith("train") for name in prepared.splits):
        print("There is no train_mask, and training needs one: --split 0.6 0.2 0.2, or a column called split.")
    is_plain = preparation.shard is None and not preparation.plan.have_names
    if is_plain and not preparation.undirected and not _may_be_undirected(preparation.target):
        print("Not every edge has its reverse. If the graph is undirected, prepare it with --undirected.")


def _may_be_undirected(graph: Path) -> bool:
    """Whether every node sends as many edges as it receives, as in an undirected graph. Nothing is mapped."""
    starts, senders = NpyFile.of(graph / "indptr.npy"), NpyFile.of(graph / "indices.npy")
    degrees = np.diff(starts.read(0, starts.shape[0]))
    for first in range(0, senders.shape[0], SENDERS_AT_ONCE):
        piece = senders.read(first, min(SENDERS_AT_ONCE, senders.shape[0] - first))
        np.subtract.at(degrees, piece, 1)
    return not degrees.any()
