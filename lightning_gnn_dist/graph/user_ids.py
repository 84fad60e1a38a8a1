"""The ids that a user's tables have for nodes, kept beside a saved graph whose nodes are the rows of these tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn_dist.checks import check_path, shown
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.store import IDS, check_unchanged

Ids = NDArray[Any]
_AT_ONCE = 1 << 20  # ids that are compared together
Columns = Callable[[int, Ids], dict[str, Ids]]  # of some rows of a table, given the number of the first
# Suffixes of what lies beside the ids of a type: two files of names, and a folder of columns.
CLASSES, CATEGORIES, OWN = ".classes", ".categories", ".own"
WITHOUT_IDS = (
    "has no such ids of nodes: `prepare` keeps them where it reads nodes from a table. Prepare the graph anew if an "
    "older release has made it; of a split or of shards, name the graph that these were made of."
)


def class_names(path: str | Path, node_type: str = "") -> list[str] | None:
    """Return the words that a table has as labels, in the order of their numbers in ``y``; None where it has numbers.

    Args:
        path: A graph that :func:`prepare_graph` has made of tables.
        node_type: The type of the nodes, of a graph with types.
    """
    file = ids_file(check_path("path", path), node_type).with_suffix(CLASSES)
    return np.load(file, allow_pickle=False).tolist() if file.exists() else None


def category_names(path: str | Path, node_type: str = "") -> dict[str, list[str]]:
    """Return the words of each column of ``categories``, of which the first is 1, as 0 is none of them.

    Args:
        path: A graph that :func:`prepare_graph` has made of tables.
        node_type: The type of the nodes, of a graph with types.
    """
    file = ids_file(check_path("path", path), node_type).with_suffix(CATEGORIES)
    found: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def ids_beside(folder: Path | None, node_type: str) -> Ids | None:
    """Map the users' ids of all nodes of a type; None where the graph was not prepared from a table."""
    if folder is None or not (file := ids_file(folder, node_type)).exists():
        return None
    check_unchanged(folder)
    ids: Ids = np.load(file, mmap_mode="r", allow_pickle=False)
    return ids


def all_ids(folder: Path | None, node_types: Iterable[str]) -> dict[str, Ids]:
    """Return the users' ids of each type that has some, by the names of their files."""
    found = {kind: ids_beside(folder, kind) for kind in node_types}
    return {kind or "nodes": ids for kind, ids in found.items() if ids is not None}


@dataclass(frozen=True)
class NodeColumns:
    """The columns of a table of rows of nodes, ``node`` and ``row``, as a writer of tables asks for them.

    Questions of a database have the columns of their table in place of ``node``. Where labels were words, and a row has
    a number for each of them, or is the number of one, ``class`` is the word of the greatest, or of that number. Beside
    a question's own column ``row`` what is predicted is ``predicted_row``, and likewise ``predicted_class``.

    Attributes:
        ids: The users' ids of all nodes; None where nobody knows them, and nodes are numbered from 0.
        nodes: The node of each row. Default: row ``v`` is that of node ``v``.
        own: The columns of questions.
        classes: The names of labels.
    """

    ids: Ids | None = None
    nodes: Ids | None = None
    own: Mapping[str, Ids] = field(default_factory=dict)
    classes: Sequence[str] = ()

    def __call__(self, first: int, rows: Ids) -> dict[str, Ids]:
        some = slice(first, first + len(rows))
        nodes = np.arange(some.start, some.stop) if self.nodes is None else self.nodes[some]
        columns = {name: column[nodes] for name, column in self.own.items()} or {"node": named(nodes, self.ids)}
        made = {"row": rows} | self._class_of(rows)
        return columns | {f"predicted_{name}" if name in columns else name: each for name, each in made.items()}

    def _class_of(self, rows: Ids) -> dict[str, Ids]:
        count, are_numbers = len(self.classes), rows.ndim == 1 and rows.dtype.kind in "iu"
        if not count or not (are_numbers or rows.shape[1:] == (count,)):
            return {}
        numbers = rows if are_numbers else rows.argmax(1)
        return {"class": np.array([*self.classes, ""])[np.where((numbers >= 0) & (numbers < count), numbers, count)]}


def named(nodes: Ids, ids: Ids | None) -> Ids:
    """Return the users' ids of some nodes, or the nodes where there are none."""
    return nodes if ids is None else ids[nodes]


def ids_for(given: Path | None, graph: Path | None, kind: str, count: int, some: Ids | None = None) -> Ids | None:
    """Return the users' ids of the nodes that are predicted.

    Args:
        given: The graph that the user has named for them, or None.
        graph: The folder of the graph that is predicted, if it has one.
        kind: The type of the nodes.
        count: How many nodes it has.
        some: Those that are predicted. Default: all.
    """
    found = ids_beside(graph, kind) if given is None else known_ids(given, kind)
    if found is None:
        return None
    most = count if some is None else int(some.max()) + 1
    if len(found) < most or len(found) > count:
        raise ValueError(
            f"{given or graph} has ids of {len(found)} nodes, and the graph that is predicted has {count}: nodes "
            f"that came later have no ids. Write a .npy, predict those that have, data.only(range({len(found)})), or "
            "name the prepared graph that has them all as ids_of."
        )
    return found


def columns_for(given: Path | None, graph: Path | None, kind: str, count: int, some: Ids | None = None) -> NodeColumns:
    """Return how a table names the nodes that are predicted, as :func:`ids_for` finds their ids."""
    ids, folder = ids_for(given, graph, kind, count, some), graph if given is None else given
    if ids is None or folder is None:
        return NodeColumns(ids, some)
    files = sorted(ids_file(folder, kind).with_suffix(OWN).glob("*.npy"))
    own = {file.stem.partition(" ")[2]: np.load(file, mmap_mode="r") for file in files}
    return NodeColumns(ids, some, own, class_names(folder, kind) or ())


def known_ids(folder: Path, node_type: str) -> Ids:
    """Return the users' ids of all nodes of a type; a graph that was not prepared from tables is refused."""
    found = ids_beside(folder, node_type)
    if found is None:
        raise ValueError(f"path: {folder} {WITHOUT_IDS}")
    return found


def user_ids(path: str | Path, node_type: str = "") -> Ids:
    """Map the ids of all nodes as the tables have them that a graph was prepared from: that of node ``v`` at ``v``.

    Args:
        path: A graph that :func:`prepare_graph` has made of tables.
        node_type: The type of the nodes, of a graph with types.
    """
    return known_ids(check_path("path", path), node_type)


def nodes_with_ids(path: str | Path, ids: Sequence[Any] | Ids, node_type: str = "") -> Tensor:
    """Return the nodes that have these ids in the user's tables, in their order.

        data.only(nodes_with_ids("my_graph", ["W2741809807", "W2755950973"]))

    Args:
        path: A graph that :func:`prepare_graph` has made of tables.
        ids: The ids, texts or numbers as the table has them.
        node_type: The type of the nodes, of a graph with types.
    """
    known, asked = known_ids(check_path("path", path), node_type), np.asarray(ids)
    if asked.dtype.kind == "f" and known.dtype.kind not in "iuf" and isinstance(ids, list | tuple):
        asked = np.asarray(ids, object)  # ints of 2**63 and above beside smaller ones would be rounded
    if asked.ndim != 1 or asked.size == 0:
        raise ValueError(f"ids must be a list of ids as the tables have them, got {shown(ids)}.")
    try:
        numbers = asked.astype(known.dtype) if known.dtype.kind in "iuf" else asked.astype(str)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"ids must be numbers, as those of {path} are, got {shown(ids)}.") from error
    if known.dtype.kind in "iu" and asked.dtype.kind in "fu" and (numbers != asked).any():
        raise ValueError(f"ids must be whole numbers, as those of {path} are, got {shown(ids)}.")
    asked = numbers
    found = places_of(known, asked)
    if (missing := np.flatnonzero(found < 0)).size:
        raise ValueError(f"ids: no node of {path} has the id {shown(asked[missing[0]].item())}.")
    return torch.from_numpy(found)


def ids_file(folder: Path, node_type: str) -> Path:
    """The file of the ids of a type in a saved graph, beside which the rest lies."""
    return folder / IDS / f"{node_type or 'nodes'}.npy"


def keep_ids(ids: Path, folder: Path, node_type: str) -> None:
    """Copy into the folder of a saved graph a file of ids, and what lies beside it.

    That is ``classes.npy``, the names of labels that were words, ``categories.json``, those of columns, and ``own``, a
    folder with the columns that say what a row of a table of questions is.
    """
    file = ids_file(folder, node_type)
    file.parent.mkdir(exist_ok=True)
    kept = {ids: file, ids.with_name("classes.npy"): file.with_suffix(CLASSES)}
    kept[ids.with_name("categories.json")] = file.with_suffix(CATEGORIES)
    kept |= {own: file.with_suffix(OWN) / own.name for own in (ids.parent / "own").glob("*.npy")}
    for source, target in kept.items():
        if source.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
            flush(target)


def places_of(ids: Ids, asked: Ids) -> NDArray[np.int64]:
    """Return the node that has each id, -1 where none has it, by one pass over all of them."""
    order = asked.argsort(kind="stable")
    found, in_order = np.full(len(asked), -1), asked[order]
    for first in range(0, len(ids), _AT_ONCE):
        piece = ids[first : first + _AT_ONCE]
        start, end = np.searchsorted(in_order, piece, "left"), np.searchsorted(in_order, piece, "right")
        for at in np.flatnonzero(end > start):
            found[order[start[at] : end[at]]] = first + at
    return found
