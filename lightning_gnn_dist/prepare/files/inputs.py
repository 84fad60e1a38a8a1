"""The files that a graph is prepared of, by types; a graph without types is one of one type, whose names are empty."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.storage.store import check_unchanged
from lightning_gnn_dist.graph.typed.names import EdgeType, OneType, check_names, within
from lightning_gnn_dist.prepare.files.arrays import (
    ALIASES,
    Carried,
    Entry,
    LoadedArray,
    RowFiles,
    check_drop,
    check_purposes,
    entries,
    id_of,
    load_pyg,
    names_in,
    number_in,
    purpose_of,
)
from lightning_gnn_dist.prepare.tables.reading import (
    about_headings,
    check_there,
    columns_of,
    count_rows,
    ends_first,
    files_of,
    is_one_table,
    is_table,
    is_text,
    name_of,
)

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.tables import Tables

ALL = range(1 << 62)  # edges, however many there are


class Piece(NamedTuple):
    """Some edges: their senders, their receivers, and the file that they come from."""

    sender: Column
    receiver: Column
    file: Path


@dataclass(frozen=True, kw_only=True)
class EdgeFiles:
    """The edges of one type in files of which only headers were read.

    Args:
        files: Arrays of ends, and tables.
        num_edges: The number of edges; an estimate for text.
        columns: Names of the columns of tables that edges carry.
        carried: The arrays that edges carry, in the order of the edges.
        num_senders: The number of nodes of the source type; None if that is not known.
        num_receivers: The number of nodes of the destination type; likewise.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
    """

    files: tuple[NpyFile | Path, ...]
    num_edges: int
    columns: tuple[str, ...] = ()
    carried: Carried = field(default_factory=lambda: Carried({}))
    num_senders: int | None = None
    num_receivers: int | None = None
    flip: bool = False

    @classmethod
    def of(cls, place: Entry, drop: Collection[str] = ()) -> EdgeFiles:
        """An array or a table of edges, or all of a folder, in the order of their names."""
        found: Sequence[Entry] = [place]
        if isinstance(place, Path) and not is_one_table(place):
            found = sorted(filter(_is_known, place.iterdir())) if place.is_dir() else files_of(place)
        if not found or not all(map(_is_known, found)):
            raise ValueError(
                f"{place} holds no edges: give a .npy of shape (2, E) or (E, 2), a table (.csv, .tsv, .txt, also "
                "gzipped, or .parquet) whose two columns are sender and receiver, a folder of such files, an .npz, or "
                "a PyG file (.pt)."
            )
        files = tuple(file if isinstance(file, Path) and is_table(file) else _ends(file) for file in found)
        return cls(files=files, num_edges=sum(map(count_edges, files)), columns=_columns(files, drop))

    @property
    def tables(self) -> tuple[Path, ...]:
        """Those files that are tables."""
        return tuple(file for file in self.files if isinstance(file, Path))

    @property
    def are_arrays(self) -> bool:
        """Whether all of them are arrays of ends."""
        return all(isinstance(file, NpyFile) for file in self.files)

    @property
    def has_text(self) -> bool:
        """Whether there are tables of text, which take long to read and whose lengths are estimates."""
        return any(map(is_text, self.tables))

    def pieces(self, edges_at_once: int, within: range = ALL) -> Iterator[Piece]:
        """Yield the edges of arrays, or those in a range of all, in the same pieces every time."""
        begin = 0
        for array in self.files:
            assert isinstance(array, NpyFile)
            count = count_edges(array)
            run = range(max(within.start - begin, 0), min(within.stop - begin, count))
            for first in run[::edges_at_once]:
                yield self._checked(Piece(*_read(array, first, min(edges_at_once, run.stop - first)), array.path))
            begin += count

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


def _is_known(file: Entry) -> bool:
    return isinstance(file, NpyFile) or is_table(file) or (file.is_file() and file.suffix == ".npy")


def _columns(files: Collection[NpyFile | Path], drop: Collection[str]) -> tuple[str, ...]:
    """The columns that edges carry, in the order of the first table; all files must have the same."""
    of_files = {
        file: [name for name in ends_first(file)[2:] if name not in drop] if isinstance(file, Path) else []
        for file in files
    }
    first, expected = next(iter(of_files.items()))
    for file, names in of_files.items():
        if sorted(names) != sorted(expected):
            raise ValueError(
                f"{file} has the columns {names} beside the two ends of an edge, but {first} has {expected}: files of "
                "one list of edges must be alike, or these columns left out (--drop)."
            )
    return tuple(expected)


def _ends(file: Entry) -> NpyFile:
    array = file if isinstance(file, NpyFile) else NpyFile.of(file)
    if len(array.shape) != 2 or 2 not in array.shape or array.dtype.kind not in "iu":
        raise ValueError(f"{array.path} must hold integers of shape (2, E) or (E, 2), got {array.dtype} {array.shape}.")
    return array


def turn_two_edges(file: Path) -> None:
    """Write an array of two edges with a row for each end, as its two rows would be taken for that."""
    if NpyFile.of(file).shape[0] == 2:
        save(file, np.ascontiguousarray(np.load(file).T))


def count_edges(file: NpyFile | Path) -> int:
    """How many edges an array or a table has; of a text an estimate."""
    if isinstance(file, Path):
        return count_rows(file)
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


PYG = {".pt", ".pth"}
NODE, EDGE = OneType.node_types[0], OneType.edge_types[0]


@dataclass(frozen=True)
class NodeFiles:
    """The files of the nodes of one type, of which only headers were read.

    Args:
        source: Where they are.
        table: A table with an id in each row, if there is one.
        arrays: The arrays per node, and lists of nodes (``train_idx``), by their names in a graph.
        num_nodes: The number of nodes; None if a table or the edges tell.
        float_labels: Whether a label with fractions is the answer of a regression.
    """

    source: Path
    table: Path | None
    arrays: dict[str, RowFiles]
    num_nodes: int | None
    float_labels: bool = False

    @classmethod
    def of(cls, source: Path, found: Mapping[str, Entry], table: Path | None = None) -> NodeFiles:
        """The nodes in some arrays."""
        arrays = _rows(source, found)
        stated = number_in(arrays.pop("num_nodes")) if "num_nodes" in arrays else None
        for name, rows in arrays.items():
            if not rows.shape:
                raise ValueError(f"{name}.npy holds a single number, and needs a row for each node or edge.")
        shown_by = next((arrays[name].shape[0] for name in ("x", "y", "train_mask") if name in arrays), None)
        return cls(source, table, arrays, shown_by if stated is None else stated)

    def beside(self, arrays: Mapping[str, RowFiles]) -> NodeFiles:
        """The same nodes with more arrays, which stand for those of the same name."""
        check_purposes(((name, purpose_of(name)) for name in (*arrays, *self.arrays)), self.source)
        return replace(self, arrays=self.arrays | dict(arrays))


Told = list[tuple[str, str, str]]  # a table, a column, and what it becomes


class Unpacked(NamedTuple):
    """The files without tables, the files of ids, by the types of nodes, and what columns and tables became."""

    inputs: Inputs
    ids: dict[str, Path]
    told: Told
    tables: Tables | None = None


@dataclass(frozen=True)
class Inputs:
    """The files of a graph.

    Args:
        nodes: Those of each node type.
        edges: Those of each edge type.
        layout: What they were taken for, in words.
        time: The array of times, if there is one.
        unpack: Turns tables into arrays where they say themselves what is in them, given the files, a folder, columns
            to drop, bytes of memory, and who is told of stages.
        lines: What such tables say of themselves, in words.
    """

    nodes: dict[str, NodeFiles]
    edges: dict[EdgeType, EdgeFiles]
    layout: str
    time: str | None = None
    unpack: Callable[..., Unpacked] | None = None
    lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse names of arrays that a graph cannot have."""
        if not self.have_names:
            convert.check_names(self.nodes[NODE].arrays, self.edges[EDGE].carried.arrays)
            return
        of_types: dict[str | EdgeType, Collection[str]] = {kind: files.arrays for kind, files in self.nodes.items()}
        of_types |= {edge_type: files.carried.arrays for edge_type, files in self.edges.items()}
        for kind, names in of_types.items():
            with within(kind):
                convert.check_each_name(names, allowed=())

    @classmethod
    def of(cls, source: Path, nodes: Path | None, drop: frozenset[str], time: str | None) -> Inputs:
        """The files at ``source``, which are of several types if it has the folders ``nodes`` and ``edges``.

        Args:
            source: A PyG ``.pt``, arrays, or tables.
            nodes: The table, or the arrays, of nodes that go with edges alone.
            drop: Columns and arrays to leave out, wherever they are.
            time: The array of times, if there is one.
        """
        if source.suffix in PYG and not source.is_dir():
            found, names = _of_pyg(source, nodes, drop)
        else:
            found, names = (_of_folders if is_typed(source) else _of_one_type)(source, nodes, drop)
        return fitting(found, names, source, drop, time)

    @property
    def have_names(self) -> bool:
        """Whether the types have names."""
        return NODE not in self.nodes

    @property
    def headings(self) -> tuple[str, ...]:
        """What is taken for the headings of tables, or what tables say of themselves, in words."""
        return self.lines or about_headings(self.tables)

    @property
    def tables(self) -> list[Path]:
        """All tables, which become arrays first."""
        of_nodes = [files.table for files in self.nodes.values() if files.table is not None]
        return [*of_nodes, *(file for files in self.edges.values() for file in files.tables)]

    @property
    def halves(self) -> set[str]:
        """The names of all arrays of bfloat16, which files hold as bits."""
        of_all = [files.arrays for files in self.nodes.values()] + [of.carried.arrays for of in self.edges.values()]
        return {n for arrays in of_all for n, rows in arrays.items() if rows.files[0].type == torch.bfloat16}


def fitting(found: Inputs, names: Collection[str], source: Path, drop: Collection[str], time: str | None) -> Inputs:
    """The files with their times; refuse to drop, or to order by, what is in none of them."""
    check_drop(drop, names, source)
    if time is not None and found.have_names and time not in names:
        raise ValueError(f"time names the column {shown(time)}, and {source} has these: {shown(sorted(names))}.")
    return replace(found, time=time)


def is_typed(path: Path) -> bool:
    """Whether it is a folder of tables of several types."""
    return all((path / name).is_dir() for name in ("nodes", "edges")) and not (path / "meta.json").exists()


def edge_files(source: Path, found: dict[str, Entry], drop: Collection[str] = ()) -> EdgeFiles:
    """The edges in some arrays, ``edge_index`` and what edges carry."""
    if "edge_index" not in found:
        raise ValueError(f"{source} holds no edge_index, of shape (2, edges), but {sorted(found)}.")
    edges, carried = EdgeFiles.of(found["edge_index"], drop), _rows(source, found)
    for name, rows in carried.items():
        if edges.has_text or rows.shape[:1] != (edges.num_edges,):
            told = " in text, which can carry nothing here" if edges.has_text else ""
            raise ValueError(
                f"{source}: {name} has shape {rows.shape}, and there are {edges.num_edges} edges{told}: leave it out "
                "(--drop)."
            )
    return replace(edges, carried=Carried(carried))


def _rows(source: Path, found: Mapping[str, Entry]) -> dict[str, RowFiles]:
    """Arrays by their names in a graph. Those of PyG have these names already."""
    rows = {name: RowFiles.of(entry) for name, entry in found.items() if name != "edge_index"}
    if source.suffix in PYG:
        return rows
    check_purposes(((name, purpose_of(name)) for name in rows), source)
    return {ALIASES.get(name, name): array for name, array in rows.items()}


def _of_one_type(source: Path, nodes: Path | None, drop: frozenset[str]) -> tuple[Inputs, set[str]]:
    """Edges with arrays beside them, or edges alone; perhaps a table, or more arrays, of nodes."""
    if (source / "meta.json").exists():
        check_unchanged(source)
        raise ValueError(f"{source} is a saved graph already: Graph.open(path) reads it.")
    has_arrays = (source.is_dir() and not is_table(source)) or source.suffix == ".npz"
    found, names = entries(source, drop) if has_arrays else {}, set(names_in(source) if has_arrays else ())
    if "edge_index" not in found and source.suffix != ".npz":
        found, names = {"edge_index": source}, set()
    of_edges = {name: entry for name, entry in found.items() if convert.is_of_edges(ALIASES.get(name, name))}
    edges = edge_files(source, of_edges, drop)
    of_nodes = NodeFiles.of(source, {name: entry for name, entry in found.items() if name not in of_edges})
    names |= {name for table in edges.tables for name in ends_first(table)[2:]}
    if nodes is not None:
        check_there(nodes)
        of_nodes, names = _nodes_at(nodes, drop).beside(of_nodes.arrays), names | _names(nodes)
    return Inputs({NODE: of_nodes}, {EDGE: edges}, "edges of one type"), names - {"edge_index"}


def _of_folders(folder: Path, nodes: Path | None, drop: frozenset[str]) -> tuple[Inputs, set[str]]:
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
    _check_ends(of_nodes, of_edges, folder)
    check_names(tuple(of_nodes), tuple(of_edges))
    names = set().union(*map(_names, of_nodes.values()), *map(_names_of_edges, of_edges.values()))
    found_nodes, found_edges = {}, {}
    for kind, path in of_nodes.items():
        with within(kind):
            found_nodes[kind] = _nodes_at(path, drop)
    for edge_type, path in of_edges.items():
        with within(edge_type):
            files = EdgeFiles.of(path, drop) if is_table(path) else edge_files(path, entries(path, drop), drop)
            found_edges[edge_type] = files
    return Inputs(found_nodes, found_edges, "the folders nodes and edges, a table of each type"), names - {"edge_index"}


def _of_pyg(path: Path, nodes: Path | None, drop: frozenset[str]) -> tuple[Inputs, set[str]]:
    """A ``Data`` or ``HeteroData`` that was saved."""
    if nodes is not None:
        raise ValueError(f"{path} holds nodes as well as edges: leave the table of nodes ({nodes}) out.")
    from lightning_gnn_dist.graph.typed import hetero  # other files need none of it

    of_nodes, of_edges = hetero.contents_of(load_pyg(path))
    names = {name for content in (*of_nodes.values(), *of_edges.values()) for name in content}
    found_nodes, found_edges = {}, {}
    for kind, content in of_nodes.items():
        with within(kind):
            count = hetero.count_of(content, dict(hetero.tensors_of(content)))
            found_nodes[kind] = NodeFiles(path, None, _rows(path, _loaded(path, content, drop)), count)
    for edge_type, content in of_edges.items():
        with within(edge_type):
            ends = {"edge_index": LoadedArray.of_array(path / "edge_index", hetero.edge_index_of(content))}
            found_edges[edge_type] = edge_files(path, _loaded(path, content, drop) | ends)
    return Inputs(found_nodes, found_edges, "a graph of PyG"), names - {"edge_index"}


def _loaded(path: Path, content: Mapping[str, Any], drop: Collection[str]) -> dict[str, Entry]:
    """What PyG holds of a type as arrays by name."""
    from lightning_gnn_dist.graph.typed.hetero import tensors_of

    tensors = tensors_of({name: value for name, value in content.items() if name not in drop})
    return {name: LoadedArray.of_array(path / name, tensor) for name, tensor in tensors}


def _nodes_at(path: Path, drop: Collection[str]) -> NodeFiles:
    """The table, or the arrays, of nodes."""
    return NodeFiles(path, path, {}, None) if is_table(path) else NodeFiles.of(path, entries(path, drop))


def _names(path: Path) -> set[str]:
    """What can be left out of a table, or of arrays, of nodes."""
    return set(columns_of(path)) - {id_of(columns_of(path))} if is_table(path) else set(names_in(path))


def _names_of_edges(path: Path) -> set[str]:
    return set(ends_first(path)[2:] if is_table(path) else names_in(path))


def _check_ends(nodes: Mapping[str, Path], edges: Mapping[EdgeType, Path], folder: Path) -> None:
    """Refuse edges of types whose nodes are nowhere, and a folder without any."""
    for name, found in (("nodes", nodes), ("edges", edges)):
        if not found:
            raise ValueError(f"{folder / name} holds no table: a graph with types needs one of nodes and one of edges.")
    for edge_type, path in edges.items():
        for end in edge_type[::2]:
            if end not in nodes:
                raise ValueError(
                    f"{path} names the node type {end!r}, and {folder / 'nodes'} has {shown(list(nodes))}: add a table "
                    f"of it, {end}.csv, or a folder {end} with num_nodes.npy, or rename the edges."
                )


def _files(folder: Path) -> dict[str, Path]:
    """The table or arrays of each type, by its name: that of the file without its suffix, or of the folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if not is_table(path) and path.suffix != ".npz" and not (path.is_dir() and any(path.rglob("*.npy"))):
            raise ValueError(
                f"{path} is no table of one type: give a text (.csv, .tsv, .txt, also gzipped), .parquet or a folder "
                "of these, an .npz, or a folder of .npy."
            )
        name = name_of(path)
        if name in found:
            raise ValueError(f"{path} and {found[name]} are two tables of one type: remove one of them.")
        found[name] = path
    return found


def with_reverse(edges: Iterable[EdgeType]) -> dict[EdgeType, EdgeType]:
    """The reverse type of each edge type, and the type that it is the reverse of."""
    found = list(edges)
    for source, name, target in found:
        if (target, f"rev_{name}", source) in found:
            raise ValueError(
                f"There are edges {(target, f'rev_{name}', source)} already: leave --reverse out, or these edges."
            )
    return {(target, f"rev_{name}", source): (source, name, target) for source, name, target in found}
