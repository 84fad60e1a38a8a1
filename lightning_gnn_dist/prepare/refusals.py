"""Refuses settings that do not fit what the files hold, and ranks that were given others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.prepare.files.inputs import Inputs
from lightning_gnn_dist.prepare.one_shard import OneShard
from lightning_gnn_dist.prepare.reading import Reading
from lightning_gnn_dist.prepare.tables.features import KINDS
from lightning_gnn_dist.prepare.tables.reading import columns_of

WRITTEN, RENAMED = 1, 2  # stages of a rank; before them there is work for which it asks the others


def check_alike(reading: Reading, inputs: Mapping[str, Any], source: Path) -> None:
    """Refuse ranks that were given other files or settings than rank 0. All raise or none.

    Files are compared by their places in ``source`` and their sizes: each host may have them elsewhere.
    """
    told: dict[str, Any] = {name: value for name, value in inputs.items() if name not in ("files", "shard")}
    shard = inputs["shard"] or {}
    told["parts"] = [size for _, size, _ in shard.get("assignment", ())], shard.get("partitioner")
    told["files"] = sorted([_name(Path(path), source), size] for path, (size, _) in inputs["files"].items())
    digest = blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=7).digest()
    found = reading.each(int.from_bytes(digest, "big"))
    if odd := [rank for rank, each in enumerate(found) if each != found[0]]:
        raise ValueError(
            f"Ranks {odd} were given other files or settings than rank 0: start all with the same command, on the same "
            "files."
        )


def needs_no_rank(reading: Reading, stage: int, *, overwrite: bool) -> bool:
    """Whether all shards are written, and some only to be renamed. All ranks raise or none."""
    stages = reading.each(stage)
    if all(stages) and WRITTEN in stages:
        return True
    if RENAMED in stages and stage != RENAMED and not overwrite:
        raise FileExistsError(
            f"The shard of rank {stages.index(RENAMED)} exists already: choose another directory, or overwrite it."
        )
    return False


def _name(path: Path, source: Path) -> str:
    return str(path.relative_to(source)) if path.is_relative_to(source) else path.name


def check_types(
    inputs: Inputs, source: Path, nodes: Path | None, *, undirected: bool, time: bool, reverse: bool, split: bool
) -> None:
    """Refuse settings of graphs with several types for one without, and the other way round."""
    if inputs.database is not None and (undirected or nodes or time or reverse or split):
        raise ValueError(
            f"{source} says itself which columns are times and keys, and which questions are to train on: leave "
            "--nodes, --undirected, --time, --reverse and --split out."
        )
    if inputs.have_names and (undirected or nodes):
        raise ValueError(
            f"{source} holds several types: their nodes are known (no --nodes), and the reverse of an edge is of "
            "another type (--reverse, no --undirected)."
        )
    if not inputs.have_names and (time or reverse):
        raise ValueError(
            "--time and --reverse are of graphs with types: a HeteroData, or a folder with folders nodes and edges."
        )


def check_kinds(kinds: Mapping[str, str], inputs: Inputs, source: Path) -> None:
    """Refuse kinds that are none, or of columns that no table has."""
    check_instance("kinds", kinds, Mapping, 'columns with their kinds, {"zip": "category"}')
    if kinds and (inputs.database is not None or not inputs.tables):
        which = "has no tables" if inputs.database is None else "says itself what columns are (columns: ...)"
        raise ValueError(f"--as says what columns of tables are, and {source} {which}: leave it out.")
    names = {name for table in inputs.tables for name in columns_of(table)} if kinds else set()
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"--as: {name!r} must be one of {shown(list(KINDS))}, got {shown(kind)}.")
        if name not in names:
            raise ValueError(f"--as names the column {name!r}, and the tables of {source} have {sorted(names)}.")


def check_tables(shard: OneShard, inputs: Inputs) -> None:
    """Refuse tables of nodes where ranks share the files: all need all ids, and none would have read them."""
    tables = [files.source for files in inputs.nodes.values() if files.table is not None]
    if shard.together and tables:
        raise ValueError(
            f"{tables[0]} is a table of nodes, and ranks that read the files together take arrays of nodes: let each "
            f"host read all files (--shard {shard.index} --num-shards {shard.num_shards}, without torchrun)."
        )
