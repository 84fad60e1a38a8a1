"""What arrays and columns are called in files, and what they become: ends of edges, labels, masks, features, times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from lightning_gnn_dist.checks import check_fits
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column

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
            word = next((each for each in ends.tolist() if not each.removeprefix("-").isdecimal()), ends[0])
            raise ValueError(
                f"{where} holds words, such as {word!r}, and {whose}, which it names, whole numbers: give both one "
                "type."
            ) from error

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


def check_classes(words: Collection[str], where: str) -> None:
    """Refuse -1 among labels that are words: it would become a class."""
    if NO_CLASS in words:
        raise ValueError(f"{where} holds {NO_CLASS} among words: where a label is a word, an empty cell is no label.")
