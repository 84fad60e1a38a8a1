"""Refuses settings that do not fit what the files hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.prepare.files.inputs import Inputs
from lightning_gnn_dist.prepare.tables.features import KINDS
from lightning_gnn_dist.prepare.tables.reading import columns_of


def check_types(
    inputs: Inputs, source: Path, nodes: Path | None, *, undirected: bool, time: bool, reverse: bool, split: bool
) -> None:
    """Refuse settings of graphs with several types for one without, and the other way round."""
    if inputs.unpack is not None and (undirected or nodes or time or reverse or split):
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
    if kinds and (inputs.unpack is not None or not inputs.tables):
        which = "has no tables" if inputs.unpack is None else "says itself what columns are (columns: ...)"
        raise ValueError(f"--as says what columns of tables are, and {source} {which}: leave it out.")
    names = {name for table in inputs.tables for name in columns_of(table)} if kinds else set()
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"--as: {name!r} must be one of {shown(list(KINDS))}, got {shown(kind)}.")
        if name not in names:
            raise ValueError(f"--as names the column {name!r}, and the tables of {source} have {sorted(names)}.")
