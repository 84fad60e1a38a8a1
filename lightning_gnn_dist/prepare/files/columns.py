"""What arrays and columns are called in files, and what they become: ends of edges, labels, masks, features, times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_gnn_dist.checks import check_fits, check_instance, check_words
from lightning_gnn_dist.graph import convert

SPLITS = ("train", "val", "test")
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


@dataclass(frozen=True)
class Choice:
    """What a user says of columns.

    Args:
        drop: Columns and arrays to leave out.
        kinds: The kinds of features, where they are told.
    """

    drop: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)


def named_kinds(kinds: Mapping[str, str] | None) -> Mapping[str, str]:
    """Refuse what is no dict of words, and return it."""
    if kinds is not None:
        check_instance("kinds", kinds, Mapping, 'a dict of columns, such as {"zip": "category"}')
        check_words("kinds", [*kinds, *kinds.values()], '{"zip": "category"}')
    return kinds or {}


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


def check_classes(words: Collection[str], where: str) -> None:
    """Refuse -1 among labels that are words: it would become a class."""
    if NO_CLASS in words:
        raise ValueError(f"{where} holds {NO_CLASS} among words: where a label is a word, an empty cell is no label.")
