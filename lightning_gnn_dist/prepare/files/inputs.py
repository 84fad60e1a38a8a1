"""The files that a graph is prepared of in bounded memory, by types; a graph without types is one of one type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from lightning_gnn_dist.graph.typed.names import EdgeType, OneType
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, purpose_of
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles, entries
from lightning_gnn_dist.prepare.files.raw import check_purposes
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles
from lightning_gnn_dist.prepare.files.table_files import about_headings, columns_of, is_table
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables, is_typed

NO_FILES = GraphFiles(EdgeFiles((), 0), {}, Carried({}), None)


@dataclass(frozen=True)
class Inputs:
    """The files of a graph, of which only headers were read.

    Args:
        nodes: The table, or the folder of arrays, of each node type. None: ``plain`` has the arrays.
        edges: The same of each edge type.
        drop: Columns and arrays to leave out, wherever they are.
        headings: What is taken for the headings of tables, in words.
        plain: Of a graph without types, the edges and the arrays. What a table of nodes holds is not among them.
    """

    nodes: dict[str, Path | None]
    edges: dict[EdgeType, Path]
    drop: frozenset[str]
    headings: tuple[str, ...]
    plain: GraphFiles | None = None

    @classmethod
    def of(cls, source: Path, nodes: Path | None, drop: frozenset[str], time: str | None) -> Inputs:
        """The files in ``source``, which are of several types if it has the folders ``nodes`` and ``edges``."""
        if is_typed(source):
            tables = TypedTables.of(source, drop, time)
            return cls({**tables.nodes}, tables.edges, drop, tables.headings)
        if nodes is not None and not is_table(nodes):
            raise ValueError(
                f"{nodes} is no table of nodes: give a text (.csv, .tsv, .txt, also gzipped), .parquet or a folder of "
                "these, or y.npy, x.npy, ... beside the edges."
            )
        plain = GraphFiles.of(source, drop.difference(columns_of(nodes) if nodes else ()))
        carried = tuple(name for name in plain.edges.carried if name not in drop)
        plain = replace(plain, edges=replace(plain.edges, carried=carried))
        headings = about_headings(*plain.edges.files[:1], *([nodes] if nodes else []))
        return cls({OneType.node_types[0]: nodes}, {OneType.edge_types[0]: source}, drop, headings, plain)

    @cached_property
    def have_names(self) -> bool:
        """Whether the types have names."""
        return self.plain is None

    def table_of_nodes(self, kind: str) -> Path | None:
        """The table of a node type, if it has one."""
        path = self.nodes[kind]
        return path if path is not None and is_table(path) else None

    def nodes_of(self, kind: str, unpacked: Path) -> GraphFiles:
        """The arrays of a node type. Those of a table are in the folder ``unpacked``."""
        files = NO_FILES if self.plain is None else self.plain
        if self.table_of_nodes(kind) is not None:
            return replace(files, num_nodes=None).with_arrays(unpacked)
        path = self.nodes[kind]
        return files if path is None else NO_FILES.with_arrays(_folder_of_arrays(path), self.drop)

    def has_table_of_edges(self, edge_type: EdgeType) -> bool:
        """Whether the edges of a type must be taken out of a table, as they carry something or have names for ends."""
        return is_table(self.edges[edge_type]) if self.plain is None else bool(self.plain.edges.carried)

    def edges_of(self, edge_type: EdgeType) -> GraphFiles:
        """The edges of a type that are in arrays, and what they carry."""
        return edge_files(self.edges[edge_type], self.drop) if self.plain is None else self.plain


def check_types(
    source: Path, are_several: bool, has_nodes: bool, undirected: bool, has_time: bool, reverse: bool
) -> None:
    """Refuse settings of graphs with several types for one without, and the other way round."""
    if are_several and (undirected or has_nodes):
        raise ValueError(
            f"{source} holds several types: their nodes are known (no --nodes), and the reverse of an edge is of "
            "another type (--reverse, no --undirected)."
        )
    if not are_several and (has_time or reverse):
        raise ValueError(
            "--time and --reverse are of graphs with types: a HeteroData, or a folder with folders nodes and edges."
        )


def edge_files(path: Path, drop: frozenset[str] = frozenset()) -> GraphFiles:
    """The edges of one type, and what they carry, in a folder of arrays."""
    found = {name: file for name, file in entries(_folder_of_arrays(path)).items() if name not in drop}
    if "edge_index" not in found:
        raise ValueError(f"{path} holds no edge_index, of shape (2, edges), but {sorted(found)}.")
    edges = EdgeFiles.of(found.pop("edge_index"))
    check_purposes(((name, purpose_of(name)) for name in found), path)
    rows = {ALIASES.get(name, name): RowFiles.of(file) for name, file in found.items()}
    for name, array in rows.items():
        if array.shape[:1] != (edges.num_edges,):
            raise ValueError(f"{path}: {name} has shape {array.shape}, and there are {edges.num_edges} edges.")
    return GraphFiles(edges, {}, Carried(rows), None)


def _folder_of_arrays(path: Path) -> Path:
    """Refuse what is no folder."""
    if not path.is_dir():
        raise ValueError(
            f"{path} is read in memory alone: to work with less, unpack it to a folder of .npy, or leave --out-of-core "
            "(or --shard) out."
        )
    return path
