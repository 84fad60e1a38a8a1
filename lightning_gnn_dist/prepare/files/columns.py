"""What arrays and columns are called in files, and what they become: ends of edges, labels, masks, features, times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from lightning_gnn_dist.checks import check_fits
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files.text_tables import ENDS, fits

SPLITS = ("train", "val", "test")
MOST_NUMBERS_PER_ID = 4  # between the least id and the greatest, to find nodes by one look; of 4 bytes each
# Names in use elsewhere, OGB's among them, and the names in a graph.
ALIASES = {
    "node_feat": "x",
    "feat": "x",
    "features": "x",
    "node_label": "y",
    "label": "y",
    "labels": "y",
    "edge_feat": "edge_attr",
}


NO_CLASS = "-1"


def purpose_of(name: str) -> str:
    """What an array is called in a graph."""
    return convert.SPLITS.get(name, ALIASES.get(name, name))


def check_purposes(purposes: Iterable[tuple[str, str]], where: Path | None) -> None:
    """Refuse two sources for one array. Each purpose is what something is called there, and in the graph."""
    sources: dict[str, str] = {}
    for name, array in purposes:
        if (other := sources.setdefault(array, name)) != name:
            raise ValueError(
                f"{where} holds two arrays for one purpose, {other!r} and {name!r}, which both say {array!r} of the "
                f"graph: leave one of them out (--drop {name})."
            )


def check_num_nodes(count: int, who: str) -> None:
    """Refuse a number of nodes that cannot be meant, in words that say ``who`` told it."""
    if count < 1:
        raise ValueError(f"{who} {count:,} nodes, and a graph has at least 1.")
    check_fits(convert.BYTES_PER_NODE * count, f"{who} {count:,} nodes, numbered 0, 1, 2, ..., and their edges")


def check_drop(drop: Collection[str], names: Collection[str], where: Path) -> None:
    """Refuse to drop names that are not there."""
    if missing := sorted(set(drop) - set(names)):
        raise ValueError(f"{where} has no {missing[0]!r} to drop, but {sorted(names)}.")


SPLIT_WORDS = {split: split for split in SPLITS} | {"valid": "val", "validation": "val"}


def id_of(names: Sequence[str]) -> str:
    """The column with the id of each row's node: one with such a name, otherwise the first."""
    found = [name for name in names if name.lower() in {"id", "node", "node_id"}]
    if len(found) > 1:
        raise ValueError(f"The table of nodes has {found}, each of which may say what node a row is about: rename one.")
    return found[0] if found else names[0]


def edge_columns(columns: Mapping[str, Column], edges: Path, first: int = 0) -> dict[str, Column]:
    """The columns as float32, under names that begin with ``edge_``; ``first`` is the number of the first row."""
    names = {name: f"edge_{name.removeprefix('edge_')}" for name in columns}
    check_purposes(names.items(), edges)
    return {names[name]: _numbers(name, column, edges, first) for name, column in columns.items()}


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

    def __init__(self, ids: Column | None, nodes: Path) -> None:
        _check_whole(ids, nodes)
        self._nodes = nodes
        self._ids = ids
        self._in_order: tuple[Column, Column] | None = None

    def __call__(self, ends: Column, edges: Path) -> Column:
        """The node of each end of an edge of the table ``edges``."""
        _check_whole(ends, edges)
        if self._ids is None:
            return self._numbered(ends, edges)
        places, is_known = self.find(ends)
        if (unknown := ends[~is_known]).size:
            raise ValueError(f"{edges} names node {unknown[0]}, which {self._nodes} does not list: add a row for it.")
        return places

    def find(self, ends: Column) -> tuple[Column, Column]:
        """The node of each end, and whether there is such a node at all: if not, any node."""
        assert self._ids is not None
        if self._ids.dtype.kind != ends.dtype.kind:
            if self._ids.dtype.kind != "U":
                self._ids, self._in_order = self._ids.astype(np.str_), None
            ends = ends.astype(np.str_)
        if self._ids.dtype.kind == "i" and (by_number := self._by_number) is not None:
            low, of_numbers = by_number
            is_within = (ends >= low) & (ends < low + len(of_numbers))
            places = of_numbers[np.where(is_within, ends, low) - low].astype(np.int64)
            return places.clip(min=0), is_within & (places >= 0)
        order, in_order = self._sorted(self._ids)
        at = np.searchsorted(in_order, ends).clip(max=len(in_order) - 1)
        return order[at], in_order[at] == ends

    def alike(self, ends: Column, where: str, whose: str) -> Column:
        """Ends of the kind that ids are of: digits are numbers where ids are. Both columns are named for errors."""
        assert self._ids is not None
        if ends.dtype.kind != "U" or self._ids.dtype.kind == "U":
            return ends
        try:
            return ends.astype(np.int64)
        except ValueError as error:
            word = next((each for each in ends.tolist() if not fits(each, np.int64)), ends[0])
            raise ValueError(
                f"{where} holds words, such as {word!r}, and {whose}, which it names, whole numbers: give both one "
                "type."
            ) from error

    def check_heading(self, names: Sequence[str], edges: Path) -> None:
        """Refuse two columns that are called as nodes are: their names are an edge."""
        ids = self._ids
        if ids is None or ids.dtype.kind != "U" or tuple(name.lower() for name in names) in ENDS:
            return
        if all((ids == name).any() for name in names):
            raise ValueError(
                f"{edges}: the first line names the nodes {names[0]!r} and {names[1]!r}, and would be taken as "
                "heading: write a heading above it, such as source,target."
            )

    def _numbered(self, ends: Column, edges: Path) -> Column:
        if ends.dtype.kind == "U":
            raise ValueError(
                f"{edges} names nodes by words, such as {str(ends[0])!r}, and numbers 0, 1, 2, ... are needed: give "
                "these, or a table of nodes with their ids (--nodes)."
            )
        if ends.dtype != np.int64 or ends.min(initial=0) < 0:
            raise ValueError(
                f"{edges} names nodes by other things than 0, 1, 2, ...: give the table of nodes (--nodes)."
            )
        return ends

    @cached_property
    def _by_number(self) -> tuple[int, Column] | None:
        """The least id, and the node of each number from it on, or -1; None if ids lie far apart or one comes twice."""
        assert self._ids is not None
        low, high = (int(self._ids.min()), int(self._ids.max())) if self._ids.size else (0, 0)
        if high - low >= MOST_NUMBERS_PER_ID * len(self._ids):
            return None
        nodes = np.arange(len(self._ids), dtype=np.int32 if len(self._ids) < 1 << 31 else np.int64)
        of_numbers = np.full(high - low + 1, -1, nodes.dtype)
        of_numbers[self._ids - low] = nodes
        return (low, of_numbers) if (of_numbers[self._ids - low] == nodes).all() else None

    def _sorted(self, ids: Column) -> tuple[Column, Column]:
        """The order of the ids, and the ids in it."""
        if self._in_order is None:
            order = np.argsort(ids, kind="stable")
            in_order = ids[order]
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
            arrays["y"] = column
        elif name == "split":
            arrays |= _split_column(column, nodes)
        elif name.endswith("_mask"):
            arrays[name] = flags(name, column, nodes, first)
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


def flags(name: str, column: Column, table: Path | None, first: int) -> Column:
    """Which cells are true, of a column of 0 and 1. The error counts rows from 1, without the heading."""
    cells, are_words = (np.char.lower(column), True) if column.dtype.kind == "U" else (column, False)
    marked = np.isin(cells, ["true", "1"]) if are_words else cells == 1
    unmarked = np.isin(cells, ["false", "0"]) if are_words else cells == 0
    if not (marked | unmarked).all():
        row = int((~(marked | unmarked)).argmax())
        raise ValueError(
            f"{table}: column {name!r} holds {str(column[row])!r} in row {first + row + 1}, and a mask holds 0 and 1, "
            "or False and True."
        )
    return marked


def classes_in(words: Column, where: str) -> Column:
    """The classes among distinct words: an empty one is none, and -1 would become one."""
    found: Column = words[words != ""]
    if (found == NO_CLASS).any():
        raise ValueError(f"{where} holds {NO_CLASS} among words: where a label is a word, an empty cell is no label.")
    return found


def as_labels(cells: Column, classes: Column) -> Column:
    """Labels as numbers, of words their place in ``classes``; an empty cell is -1, or NaN among fractions.

    Of numbers, which are text because of empty cells among them, ``classes`` is an empty column of their kind.
    """
    if classes.dtype.kind == "U":
        return np.where(cells == "", -1, np.searchsorted(classes, cells))
    return np.where(cells == "", NO_CLASS if classes.dtype.kind == "i" else "nan", cells).astype(classes.dtype)


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
