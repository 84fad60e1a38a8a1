"""What a graph is prepared of, by types: arrays, and tables that become arrays first.

A graph without types is one of one type, whose names are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.storage.store import check_unchanged
from lightning_gnn_dist.graph.typed.types import EDGE, NODE, EdgeType, check_names, within
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.prepare import reading
from lightning_gnn_dist.prepare.arrays import (
    ALIASES,
    EDGES,
    Carried,
    Drop,
    Entry,
    LoadedArray,
    RowFiles,
    check_purposes,
    entries,
    id_of,
    load_pyg,
    number_in,
    purpose_of,
)

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.tables import Tables

PYG = {".pt", ".pth"}
OF_DATABASES = "manifest.yaml", "database.yaml"


BothEnds = tuple[str | None, str | None]  # the columns of the two ends of edges; None is the row itself


class Piece(NamedTuple):
    """Some edges: their senders, their receivers, and the file that they come from."""

    sender: Column
    receiver: Column
    file: Path


@dataclass(frozen=True, kw_only=True)
class EdgeFiles:
    """The edges of one type in arrays of which only headers were read.

    Args:
        files: Arrays of ends. There are none yet where a table becomes them.
        carried: The arrays that edges carry, in the order of the edges.
        num_senders: The number of nodes of the source type; None if that is not known.
        num_receivers: The number of nodes of the destination type; likewise.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
    """

    files: tuple[NpyFile, ...] = ()
    carried: Carried = field(default_factory=lambda: Carried({}))
    num_senders: int | None = None
    num_receivers: int | None = None
    flip: bool = False

    @property
    def num_edges(self) -> int:
        return sum(map(count_edges, self.files))

    def pieces(self, edges_at_once: int) -> Iterator[Piece]:
        """Yield the edges, in the same pieces every time."""
        for array in self.files:
            count = count_edges(array)
            for first in range(0, count, edges_at_once):
                yield self._checked(Piece(*_read(array, first, min(edges_at_once, count - first)), array.path))

    def _checked(self, piece: Piece) -> Piece:
        """Refuse ends that are no nodes, and turn the edges round if so said."""
        sender, receiver = piece[1::-1] if self.flip else piece[:2]
        for end, ids, count in (("sender", sender, self.num_senders), ("receiver", receiver, self.num_receivers)):
            low, high = int(ids.min(initial=0)), int(ids.max(initial=-1))
            if low < 0 or (count is not None and high >= count):
                raise ValueError(
                    f"{piece.file} names the {end} {low if low < 0 else high}, but "
                    + ("ids begin at 0." if count is None else f"there are {count} nodes of its type: ids count from 0")
                    + ("" if count is None else f", so they must lie in [0, {count}).")
                )
        return Piece(sender, receiver, piece.file)


def words_of(edge_type: EdgeType) -> str:
    """A type of edges in words."""
    return " ".join(edge_type).strip() or "edges"


def turn_two_edges(file: Path) -> None:
    """Write an array of two edges with a row for each end, as its two rows would be taken for that."""
    if NpyFile.of(file).shape[0] == 2:
        save(file, np.ascontiguousarray(np.load(file).T))


def count_edges(file: NpyFile) -> int:
    """How many edges an array has."""
    return file.shape[1] if file.shape[0] == 2 else file.shape[0]


def _read(array: NpyFile, first: int, count: int) -> tuple[Column, Column]:
    has_two_rows, total = array.shape[0] == 2, count_edges(array)
    if has_two_rows != array.by_column:  # all senders, then all receivers
        return _signed(array.read(first, count)), _signed(array.read(total + first, count))
    pairs = array.read(2 * first, 2 * count).reshape(count, 2)
    return _signed(pairs[:, 0]), _signed(pairs[:, 1])


def _signed(ends: Column) -> Column:
    """The ends as int32 or int64, the types for which the loops are compiled."""
    return np.ascontiguousarray(ends, None if ends.dtype in (np.int32, np.int64) else np.int64)


@dataclass(frozen=True)
class NodeFiles:
    """The nodes of one type in arrays of which only headers were read.

    Args:
        source: Where they are.
        arrays: The arrays per node, and lists of nodes (``train_idx``), by their names in a graph.
        num_nodes: The number of nodes; None if a table or the edges tell.
        float_labels: Whether a label with fractions is the answer of a regression.
    """

    source: Path
    arrays: dict[str, RowFiles] = field(default_factory=dict)
    num_nodes: int | None = None
    float_labels: bool = False

    @classmethod
    def of(cls, source: Path, found: Mapping[str, Entry]) -> NodeFiles:
        """The nodes in some arrays."""
        arrays = _rows(source, found)
        stated = number_in(arrays.pop("num_nodes")) if "num_nodes" in arrays else None
        for name, rows in arrays.items():
            if not rows.shape:
                raise ValueError(f"{name}.npy holds a single number, and needs a row for each node or edge.")
        shown_by = next((arrays[name].shape[0] for name in ("x", "y", "train_mask") if name in arrays), None)
        return cls(source, arrays, shown_by if stated is None else stated)

    def beside(self, others: NodeFiles) -> NodeFiles:
        """The same nodes with more arrays, which stand for those of the same name."""
        check_purposes(((name, purpose_of(name)) for name in (*others.arrays, *self.arrays)), self.source)
        return replace(self, arrays=self.arrays | others.arrays, float_labels=others.float_labels)


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """A table, and what its rows become: nodes, edges, or nodes with edges.

    Args:
        path: Its files.
        columns: Those that become features, labels, splits and times.
        kind: The type of the nodes that rows are.
        key: The column of their ids; None where rows are numbered.
        edges: For each type of edges the columns of their two ends; None is the row itself.
        both_ways: Whether the reverse of these types is there, too.
        time_col: Of a database, the column of the time of a row, if there is one.
        kinds: Of a database, what columns of features are, where that is told.
    """

    path: Path
    columns: tuple[str, ...] = ()
    kind: str | None = None
    key: str | None = None
    edges: Mapping[EdgeType, BothEnds] = field(default_factory=dict)
    both_ways: bool = False
    time_col: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)

    @property
    def fkeys(self) -> dict[str, str]:
        """The columns of edges that are keys, and the types of nodes that they are keys of."""
        keys = (key for each, ends in self.edges.items() for key in zip(ends, each[::2], strict=True))
        return {end: kind for end, kind in keys if end is not None}

    def roles(self, time: str | None) -> dict[str, str]:
        """The columns that are no features, and what each is: ``time``, ``y``, ``split`` or ``mask``.

        Those of edges of a graph without types are times and labels alone.
        """
        known = ("time", "y") if EDGE in self.edges else ("time", "y", "split", "mask")
        return {name: role for name in self.columns if (role := _role(name, time)) in known}

    @property
    def words(self) -> str:
        """What it holds, in words."""
        return words_of(next(iter(self.edges))) if self.kind is None else self.kind or "nodes"

    @property
    def all_edges(self) -> dict[EdgeType, EdgeType]:
        """The types of its edges, and as which each is written: itself, or the one that it is the reverse of."""
        found = {}
        for source, name, target in self.edges:
            found[source, name, target] = source, name, target
            if self.both_ways:
                found[target, f"rev_{name}", source] = source, name, target
        return found


def _role(name: str, time: str | None) -> str:
    """What a column is by its name: ``time``, ``y``, ``split``, ``mask``, or nothing."""
    purpose = purpose_of(name.lower())
    if name == time:
        return "time"
    return purpose if purpose in ("y", "split") else "mask" if purpose.endswith("_mask") else ""


@dataclass(frozen=True)
class Plan:
    """What a graph is prepared of.

    Args:
        nodes: The arrays of each node type, and those that stand beside a table.
        edges: The arrays of each edge type.
        layout: What all was taken for, in words.
        tables: The tables, which become such arrays first.
        time: The array of times, if there is one.
        kinds: What columns of features are, where that is told.
        float_labels: Whether labels are answers of a regression, also where all are whole.
        unpacking: What turns tables into arrays where they say themselves what is in them, in place of ``Unpacking``.
        headings: What is taken for the headings of tables, or what tables say of themselves, in words.
        ids: Of tables that have become arrays, the files of ids, by the types of nodes.
        told: What became of columns that are more than numbers: a table, a column, and what it becomes.
        of_tables: What became of the tables of a database.
    """

    nodes: Mapping[str, NodeFiles]
    edges: Mapping[EdgeType, EdgeFiles]
    layout: str
    tables: tuple[TablePlan, ...] = ()
    time: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    float_labels: bool = False
    unpacking: Callable[..., Any] | None = None
    headings: tuple[str, ...] = ()
    ids: Mapping[str, Path] = field(default_factory=dict)
    told: Sequence[tuple[str, str, str]] = ()
    of_tables: Tables | None = None

    def __post_init__(self) -> None:
        """Refuse names of arrays that a graph cannot have, and times that are not one number for each row."""
        if not self.have_names:
            convert.check_names(self.nodes[NODE].arrays, self.edges[EDGE].carried.arrays)
            return
        of_types: dict[str | EdgeType, dict[str, RowFiles]] = {kind: each.arrays for kind, each in self.nodes.items()}
        of_types |= {edge_type: files.carried.arrays for edge_type, files in self.edges.items()}
        for kind, arrays in of_types.items():
            with within(kind):
                convert.check_each_name(arrays, allowed=())
                if rows := arrays.get(self.time or ""):
                    some = {str(self.time): rows.as_tensor(rows.read(0, 1))}
                    convert.check_time(some, self.time, "node" if isinstance(kind, str) else "edge")

    @property
    def have_names(self) -> bool:
        """Whether the types have names."""
        return NODE not in self.nodes

    @property
    def halves(self) -> set[str]:
        """The names of all arrays of bfloat16, which files hold as bits."""
        of_all = [files.arrays for files in self.nodes.values()] + [of.carried.arrays for of in self.edges.values()]
        return {n for arrays in of_all for n, rows in arrays.items() if rows.files[0].type == torch.bfloat16}


class Found:
    """What a reader has found, type by type.

    Args:
        drop: Columns and arrays to leave out, wherever they are.
    """

    def __init__(self, drop: Drop) -> None:
        self.drop = drop
        self.nodes, self.edges, self.tables = dict[str, NodeFiles](), dict[EdgeType, EdgeFiles](), list[TablePlan]()

    def add_nodes(self, kind: str, path: Path, beside: NodeFiles | None = None) -> None:
        """Add a table, or arrays, of the nodes of a type."""
        found = NodeFiles(path)
        if reading.is_table(path):
            key = id_of(columns := reading.columns_of(path))
            kept = self.drop.kept(name for name in columns if name != key)
            self.tables.append(TablePlan(path=path, columns=tuple(kept), kind=kind, key=key))
        else:
            found = NodeFiles.of(path, entries(path, self.drop))
        self.nodes[kind] = found if beside is None else found.beside(beside)

    def add_edges(self, edge_type: EdgeType, source: Path, arrays: Mapping[str, Entry]) -> None:
        """Add the edges in some arrays, ``edge_index`` and what edges carry, or in a table."""
        if EDGES not in arrays:
            raise ValueError(f"{source} holds no edge_index, of shape (2, edges), but {sorted(arrays)}.")
        place, carried = arrays[EDGES], _rows(source, arrays)
        if not (isinstance(place, Path) and reading.is_table(place)):
            self.edges[edge_type] = edges_in_arrays(source, _ends_in(place), carried)
            return
        if carried:
            raise ValueError(
                f"{source}: {next(iter(carried))} is an array, and the edges are in a table, beside which none can "
                "stand: give a column of the table, or leave it out (--drop)."
            )
        sender, receiver, *columns = reading.ends_first(place)
        kept = tuple(self.drop.kept(columns))
        self.tables.append(TablePlan(path=place, columns=kept, edges={edge_type: (sender, receiver)}))
        self.edges[edge_type] = EdgeFiles()


def plan_of(source: Path, nodes: Path | None, names: Iterable[str], time: str | None, kinds: Mapping[str, str]) -> Plan:
    """What is at ``source``; of several types if it has the folders ``nodes`` and ``edges``.

    Args:
        source: A PyG ``.pt``, arrays, or tables.
        nodes: The table, or the arrays, of nodes that go with edges alone.
        names: Columns and arrays to leave out, wherever they are.
        time: The array of times, if there is one.
        kinds: What columns of features are, where that is told.
    """
    reading.check_there(source)
    found = Found(drop := Drop(names))
    if any((source / name).is_file() for name in OF_DATABASES):
        of_database: Plan = extension("folder of a database")(source, drop)
        return of_database
    if source.suffix in PYG and not source.is_dir():
        layout = _add_pyg(found, source, nodes)
    elif all((source / name).is_dir() for name in ("nodes", "edges")) and not (source / "meta.json").exists():
        layout = _add_folders(found, source)
    else:
        layout = _add_one_type(found, source, nodes)
    drop.check(source)
    headings = reading.about_headings([table.path for table in found.tables])
    plan = Plan(found.nodes, found.edges, layout, tuple(found.tables), time, kinds, headings=headings)
    if time is not None and (plan.have_names or plan.tables) and time not in drop.known:
        raise ValueError(f"time names the column {shown(time)}, and {source} has these: {shown(sorted(drop.known))}.")
    return plan


def edges_in_arrays(source: Path, files: tuple[NpyFile, ...], carried: dict[str, RowFiles]) -> EdgeFiles:
    """Edges with what they carry, which must be a row for each."""
    edges = EdgeFiles(files=files, carried=Carried(carried))
    for name, rows in carried.items():
        if rows.shape[:1] != (edges.num_edges,):
            raise ValueError(
                f"{source}: {name} has shape {rows.shape}, and there are {edges.num_edges} edges: leave it out "
                "(--drop)."
            )
    return edges


def edges_in(folder: Path, *, flip: bool = False) -> EdgeFiles:
    """The edges that were written into a folder, and what they carry."""
    carried = {file.stem: RowFiles.of(file) for file in sorted(folder.glob("*.npy")) if file.stem != EDGES}
    return replace(edges_in_arrays(folder, _ends_in(folder / f"{EDGES}.npy"), carried), flip=flip)


def _ends_in(place: Entry) -> tuple[NpyFile, ...]:
    """An array of edges, or all of a folder, in the order of their names."""
    arrays = [place] if isinstance(place, NpyFile) else []
    if isinstance(place, Path):
        there = sorted(place.iterdir()) if place.is_dir() else reading.files_of(place)
        if any(map(reading.is_table, there)) and any(path.suffix == ".npy" for path in there):
            raise ValueError(f"{place} holds edges in tables and in arrays: write all as one table, or as arrays.")
        arrays = [NpyFile.of(path) for path in there if path.is_file() and path.suffix == ".npy"]
    if not arrays:
        raise ValueError(
            f"{place} holds no edges: give a .npy of shape (2, E) or (E, 2), a table (.csv, .tsv, .txt, also gzipped, "
            "or .parquet) whose two columns are sender and receiver, a folder of such files of one kind, an .npz, or "
            "a PyG file (.pt)."
        )
    for array in arrays:
        if len(array.shape) != 2 or 2 not in array.shape or array.dtype.kind not in "iu":
            raise ValueError(
                f"{array.path} must hold integers of shape (2, E) or (E, 2), got {array.dtype} {array.shape}."
            )
    return tuple(arrays)


def _rows(source: Path, found: Mapping[str, Entry]) -> dict[str, RowFiles]:
    """Arrays by their names in a graph. Those of PyG have these names already."""
    rows = {name: RowFiles.of(entry) for name, entry in found.items() if name != EDGES}
    if source.suffix in PYG:
        return rows
    check_purposes(((name, purpose_of(name)) for name in rows), source)
    return {ALIASES.get(name, name): array for name, array in rows.items()}


def _add_one_type(found: Found, source: Path, nodes: Path | None) -> str:
    """Edges with arrays beside them, or edges alone; perhaps a table, or more arrays, of nodes."""
    if (source / "meta.json").exists():
        check_unchanged(source)
        raise ValueError(f"{source} is a saved graph already: Graph.open(path) reads it.")
    has_arrays = (source.is_dir() and not reading.is_table(source)) or source.suffix == ".npz"
    arrays = entries(source, found.drop) if has_arrays else {}
    if EDGES not in arrays and source.suffix != ".npz":
        arrays = {EDGES: source}
        found.drop.known.clear()
    of_edges = {name: entry for name, entry in arrays.items() if convert.is_of_edges(ALIASES.get(name, name))}
    beside = NodeFiles.of(source, {name: entry for name, entry in arrays.items() if name not in of_edges})
    if nodes is None:
        found.nodes[NODE] = beside
    else:
        reading.check_there(nodes)
        found.add_nodes(NODE, nodes, beside)
    found.add_edges(EDGE, source, of_edges)
    return "edges of one type"


def _add_folders(found: Found, folder: Path) -> str:
    """The tables and arrays in the folders ``nodes`` and ``edges``, one of each type."""
    of_nodes, named = _files(folder / "nodes"), _files(folder / "edges")
    of_edges: dict[EdgeType, Path] = {}
    for name, path in named.items():
        if len(parts := name.split("__")) != 3:
            raise ValueError(
                f"{path}: a file of edges is called <source type>__<name>__<destination type>, such as "
                "author__writes__paper.csv. Rename it."
            )
        of_edges[parts[0], parts[1], parts[2]] = path
        for end in parts[::2]:
            if end not in of_nodes:
                raise ValueError(
                    f"{path} names the node type {end!r}, and {folder / 'nodes'} has {shown(list(of_nodes))}: add a "
                    f"table of it, {end}.csv, or a folder {end} with num_nodes.npy, or rename the edges."
                )
    check_names(tuple(of_nodes), tuple(of_edges))
    for kind, path in of_nodes.items():
        with within(kind):
            found.add_nodes(kind, path)
    for edge_type, path in of_edges.items():
        with within(edge_type):
            found.add_edges(edge_type, path, {EDGES: path} if reading.is_table(path) else entries(path, found.drop))
    return "the folders nodes and edges, a table of each type"


def _files(folder: Path) -> dict[str, Path]:
    """The table or arrays of each type, by its name: that of the file without its suffix, or of the folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if not reading.is_table(path) and path.suffix != ".npz" and not (path.is_dir() and any(path.rglob("*.npy"))):
            raise ValueError(
                f"{path} is no table of one type: give a text (.csv, .tsv, .txt, also gzipped), .parquet or a folder "
                "of these, all of one kind, an .npz, or a folder of .npy."
            )
        if (name := reading.name_of(path)) in found:
            raise ValueError(f"{path} and {found[name]} are two tables of one type: remove one of them.")
        found[name] = path
    if not found:
        raise ValueError(f"{folder} holds no table: a graph with types needs one of nodes and one of edges.")
    return found


def _add_pyg(found: Found, path: Path, nodes: Path | None) -> str:
    """A ``Data`` or ``HeteroData`` that was saved."""
    if nodes is not None:
        raise ValueError(f"{path} holds nodes as well as edges: leave the table of nodes ({nodes}) out.")
    from lightning_gnn_dist.graph.typed import hetero  # other files need none of it

    def arrays(content: Mapping[str, Any]) -> dict[str, Entry]:
        kept = {name: content[name] for name in found.drop.kept(content)}
        return {name: LoadedArray.of_array(path / name, tensor) for name, tensor in hetero.tensors_of(kept)}

    of_nodes, of_edges = hetero.contents_of(load_pyg(path))
    for kind, content in of_nodes.items():
        with within(kind):
            count = hetero.count_of(content, dict(hetero.tensors_of(content)))
            found.nodes[kind] = NodeFiles(path, _rows(path, arrays(content)), count)
    for edge_type, content in of_edges.items():
        with within(edge_type):
            ends = {EDGES: LoadedArray.of_array(path / EDGES, hetero.edge_index_of(content))}
            found.add_edges(edge_type, path, arrays(content) | ends)
    return "a graph of PyG"


def with_reverse(edges: Iterable[EdgeType]) -> dict[EdgeType, EdgeType]:
    """The reverse type of each edge type, and the type that it is the reverse of."""
    found = list(edges)
    for source, name, target in found:
        if (target, f"rev_{name}", source) in found:
            raise ValueError(
                f"There are edges {(target, f'rev_{name}', source)} already: leave --reverse out, or these edges."
            )
    return {(target, f"rev_{name}", source): (source, name, target) for source, name, target in found}
