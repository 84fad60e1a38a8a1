"""Graphs from tables: one of edges, and perhaps one of nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, purpose_of
from lightning_gnn_dist.prepare.files.raw import SPLITS, RawGraph, Source, check_drop, check_num_nodes, check_purposes
from lightning_gnn_dist.prepare.files.table_files import (
    about_headings,
    columns_of,
    count_columns,
    count_rows,
    ends_first,
    num_bytes,
    read_columns,
)
from lightning_gnn_dist.prepare.files.text_tables import ENDS, Progress, fits

SPLIT_WORDS = {split: split for split in SPLITS} | {"valid": "val", "validation": "val"}


def of_tables(edges: Path, nodes: Path | None, drop: Collection[str]) -> Source:
    """The source in a table of edges, each row with two ends, and perhaps one of nodes, each row with an id."""
    names = ends_first(columns_of(edges), edges)
    of_nodes = columns_of(nodes) if nodes else []
    check_drop(drop, [*names[2:], *(name for name in of_nodes if name != id_of(of_nodes))], edges)
    num_edges, num_nodes = count_rows(edges), count_rows(nodes) if nodes else 0
    size = 4 * (num_edges * (count_columns(edges) - 2) + num_nodes * (count_columns(nodes) - 1 if nodes else 0))

    def read(on_progress: Progress) -> RawGraph:
        share = num_bytes(edges) / (num_bytes(edges) + (num_bytes(nodes) if nodes else 0))
        pairs = read_columns(edges, set(drop) - set(names[:2]), lambda part: on_progress(part * share))
        table = _read_nodes(nodes, drop, lambda part: on_progress(share + part * (1 - share))) if nodes else None
        return _from_tables({name: pairs[name] for name in names if name in pairs}, table, edges, nodes)

    return Source(num_nodes, num_edges, size, read, about_headings(edges, *([nodes] if nodes else [])))


def _read_nodes(nodes: Path, drop: Collection[str], on_progress: Progress) -> dict[str, Column]:
    """The columns of the table of nodes by name, the ids first."""
    id_name = id_of(columns_of(nodes))
    table = read_columns(nodes, set(drop) - {id_name}, on_progress)
    return {id_name: table.pop(id_name)} | table


def id_of(names: Sequence[str]) -> str:
    """The column with the id of each row's node: one with such a name, otherwise the first."""
    found = [name for name in names if name.lower() in {"id", "node", "node_id"}]
    if len(found) > 1:
        raise ValueError(f"The table of nodes has {found}, each of which may say what node a row is about: rename one.")
    return found[0] if found else names[0]


def _from_tables(
    pairs: dict[str, Column], table: dict[str, Column] | None, edges: Path, nodes: Path | None
) -> RawGraph:
    """The graph of columns by name. The first two of ``pairs`` are the ends, the first of ``table`` the ids."""
    (from_, sender), (to, receiver), *others = pairs.items()
    arrays: dict[str, Tensor] = {}
    ids = None
    if table is not None:
        ids, *_ = table.values()
        is_row = ids.dtype.kind == "U" and all((ids == name).any() for name in (from_, to))
        if is_row and (from_.lower(), to.lower()) not in ENDS:
            raise ValueError(
                f"{edges}: the first line names the nodes {from_!r} and {to!r}, and would be taken as heading: write a "
                "heading above it, such as source,target."
            )
        columns = node_columns(dict(islice(table.items(), 1, None)), nodes)
        arrays = {name: torch.from_numpy(column) for name, column in columns.items()}
    places = places_of(np.concatenate([sender, receiver]), ids, edges, nodes)
    num_nodes = len(ids) if ids is not None else int(places.max(initial=-1)) + 1
    if ids is None and len(places):
        row = int(places.argmax()) % len(sender) + 1
        check_num_nodes(num_nodes, f"{edges} names node {num_nodes - 1} in row {row}. It would be one of")
    weights = {name: torch.from_numpy(column) for name, column in edge_columns(dict(others), edges).items()}
    return RawGraph(torch.from_numpy(places.reshape(2, -1)), num_nodes, arrays, weights)


def edge_columns(columns: Mapping[str, Column], edges: Path, first: int = 0) -> dict[str, Column]:
    """The columns as float32, under names that begin with ``edge_``; ``first`` is the number of the first row."""
    names = {name: f"edge_{name.removeprefix('edge_')}" for name in columns}
    check_purposes(names.items(), edges)
    return {names[name]: _numbers(name, column, edges, first) for name, column in columns.items()}


def places_of(ends: Column, ids: Column | None, edges: Path, nodes: Path | None) -> Column:
    """The node of each end of an edge: its row in the table of nodes, or the end itself without one."""
    return Places(ids, nodes)(ends, edges)


def carried_of(table: dict[str, Column], edges: Path, first: int = 0) -> dict[str, Column]:
    """What the edges of a type carry: labels, masks, and numbers in all other columns."""
    of_splits = {name: table.pop(name) for name in list(table) if purpose_of(name) == "y" or _is_split(name)}
    return node_columns(of_splits, edges, first) | edge_columns(table, edges, first)


def _is_split(name: str) -> bool:
    return name == "split" or name.endswith("_mask")


class Places:
    """Finds the nodes that edges name.

    Args:
        ids: The id of each node, in the order of the table of nodes; None if nodes are numbered 0, 1, 2, ...
        nodes: The table of nodes.
    """

    def __init__(self, ids: Column | None, nodes: Path | None) -> None:
        _check_whole(ids, nodes)
        self._ids, self._nodes = ids, nodes
        self._in_order: tuple[Column, Column] | None = None

    def __call__(self, ends: Column, edges: Path) -> Column:
        """The node of each end of an edge of the table ``edges``."""
        _check_whole(ends, edges)
        if self._ids is None:
            if ends.dtype != np.int64 or ends.min(initial=0) < 0:
                what = "words" if ends.dtype.kind == "U" else "other things than 0, 1, 2, ..."
                raise ValueError(f"{edges} names nodes by {what}: give the table of nodes that lists them (--nodes).")
            return ends
        if self._ids.dtype.kind != ends.dtype.kind:
            ends, self._ids = ends.astype(np.str_), self._as_words(self._ids)
        order, in_order = self._sorted()
        at = np.searchsorted(in_order, ends).clip(max=len(in_order) - 1)
        if (unknown := ends[in_order[at] != ends]).size:
            raise ValueError(f"{edges} names node {unknown[0]}, which {self._nodes} does not list: add a row for it.")
        places: Column = order[at]
        return places

    def _as_words(self, ids: Column) -> Column:
        self._in_order = self._in_order if ids.dtype.kind == "U" else None
        return ids.astype(np.str_)

    def _sorted(self) -> tuple[Column, Column]:
        """The order of the ids, and the ids in it."""
        if self._in_order is None:
            assert self._ids is not None
            order = np.argsort(self._ids, kind="stable")
            in_order = self._ids[order]
            if (twice := in_order[1:][in_order[1:] == in_order[:-1]]).size:
                raise ValueError(f"{self._nodes} lists node {twice[0]} twice: every node has one row.")
            self._in_order = order, in_order
        return self._in_order


def _check_whole(column: Column | None, table: Path | None) -> None:
    """Refuse ids that are neither whole numbers nor words."""
    if column is not None and column.dtype.kind == "U" and (column == "").any():
        raise ValueError(f"{table} has a row with an empty cell for the id of a node: fill it, or remove such rows.")
    if column is not None and column.dtype.kind == "f":
        row = int((~(np.abs(column) < 2**53) | (column % 1 != 0)).argmax())
        raise ValueError(
            f"{table} names nodes by numbers with a fraction, or beyond 2**63 (such as {column[row]}): an id is a "
            "whole number or a word. Empty cells become such numbers: remove those rows, and cast the column to "
            "whole numbers."
        )


def node_columns(columns: Mapping[str, Column], nodes: Path | None, first: int = 0) -> dict[str, Column]:
    """Labels, masks, and features ``x`` of all other columns; ``first`` is the number of the first row."""
    made = {name: [f"{split}_mask" for split in SPLITS] if name == "split" else [purpose_of(name)] for name in columns}
    check_purposes(((name, array) for name, those in made.items() for array in those), nodes)
    arrays: dict[str, Column] = {}
    features = []
    for name, column in columns.items():
        if ALIASES.get(name, name) == "y":
            check_labels(name, column, nodes, first)
            arrays["y"] = np.unique(column, return_inverse=True)[1] if column.dtype.kind == "U" else column
        elif name == "split":
            arrays |= _split_column(column, nodes)
        elif name.endswith("_mask"):
            arrays[name] = _flags(name, column, nodes, first)
        else:
            features.append(_numbers(name, column, nodes, first))
    if features:
        arrays["x"] = np.column_stack(features)
    return {name: arrays[name] for name in ("x", "y", *sorted(arrays)) if name in arrays}  # the order of a directory


def _split_column(column: Column, nodes: Path | None) -> dict[str, Column]:
    words = np.char.lower(column.astype(np.str_))
    masks = {f"{split}_mask": np.zeros(len(words), np.bool_) for split in SPLITS}
    for word in np.unique(words):
        if word in SPLIT_WORDS:
            masks[f"{SPLIT_WORDS[word]}_mask"] |= words == word
        elif word not in {"", "none", "-"}:
            raise ValueError(f"{nodes} puts nodes into the split {str(word)!r}: train, val, test or nothing is known.")
    return masks


def _numbers(name: str, column: Column, table: Path | None, first: int) -> Column:
    """Refuse a column that is not finite numbers. The error counts rows from 1, without the heading."""
    if column.dtype.kind == "U":
        bad = np.array([not fits(cell, np.float64) for cell in column])
        what = "is no finite number"
    else:
        is_whole = column.dtype.kind in "iu"
        with np.errstate(over="ignore", invalid="ignore"):
            numbers: Column = column.astype(np.float32)
            bad = (
                (np.abs(column) >= 2**62) | (numbers.astype(np.int64) != column) if is_whole else ~np.isfinite(numbers)
            )
        what = "float32 rounds: write it with a fraction (.0) if that may be" if is_whole else "is no finite float32"
        if not bad.any():
            return numbers
    row = int(bad.reshape(len(column), -1).any(1).argmax())
    raise ValueError(
        f"{table}: column {name!r} holds {str(column[row])!r} in row {first + row + 1}, which {what}. Give another "
        f"number, or leave the column out (--drop {name})."
    )


def _flags(name: str, column: Column, table: Path | None, first: int) -> Column:
    flags = np.char.lower(column) if column.dtype.kind == "U" else column
    marked = np.isin(flags, ["true", "1"]) if column.dtype.kind == "U" else flags == 1
    unmarked = np.isin(flags, ["false", "0"]) if column.dtype.kind == "U" else flags == 0
    if not (marked | unmarked).all():
        row = int((~(marked | unmarked)).argmax())
        raise ValueError(
            f"{table}: column {name!r} holds {str(column[row])!r} in row {first + row + 1}, and a mask holds 0 and 1, "
            "or False and True."
        )
    return marked


def check_labels(name: str, column: Column, table: Path | None, first: int) -> None:
    """Refuse empty words, which would become a class of their own."""
    if column.dtype.kind == "U" and (column == "").any():
        raise ValueError(
            f"{table}: column {name!r} is empty in row {first + int((column == '').argmax()) + 1}. Give that node a "
            "class; where classes are whole numbers, -1 says that a node has none."
        )


def times_of(name: str, column: Column, table: Path, first: int = 0) -> Column:
    """Refuse a column of times that is not one number for each row; ``first`` is the number of the first row."""
    if column.dtype.kind not in "iuf" or column.ndim != 1:
        raise ValueError(
            f"{table}: column {name!r} holds {str(column[0])!r} in row {first + 1}, and times are numbers, such as "
            "days or seconds since 1970."
        )
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise ValueError(
            f"{table}: column {name!r} is empty or NaN in row {first + int(np.isnan(column).argmax()) + 1}, and every "
            "row needs a time: remove the row, or give one."
        )
    return column
