"""The chunked graph of DGL and GraphStorm: ``metadata.json`` names types, how many there are, and files of numbers.

Nodes of each type are numbered 0, 1, 2, ... Neither library is needed. Types called ``_N`` and ``_N:_E:_N``, DGL's
names where there are none, are a graph without types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.files import check_entries, is_a, read_json
from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.prepare.files.chunks import FORMATS, METADATA, Chunks, read_ids
from lightning_gnn_dist.prepare.files.columns import ALIASES, check_purposes, purpose_of
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.inputs import EDGE, NODE, Inputs, NodeFiles, fitting, is_typed
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles

LAYOUT = f"a chunked graph of DGL or GraphStorm ({METADATA})"
DGL_NODE, DGL_EDGE = "_N", "_N:_E:_N"
_AS_OTHERS = "Write it as DGL's chunk_graph or GraphStorm's gs-processing does."


def is_chunked(folder: Path) -> bool:
    """Whether a folder says so."""
    return (folder / METADATA).is_file() and not is_typed(folder)


def inputs_of_chunks(folder: Path, nodes: Path | None, drop: frozenset[str], time: str | None) -> Inputs:
    """The files of a chunked graph."""
    path = folder / METADATA
    if nodes is not None:
        raise ValueError(f"{path} names nodes as well as edges: leave the table of nodes ({nodes}) out.")
    graph = Metadata.of(path)
    kinds = graph.kinds
    check_names(tuple(graph.num_nodes), tuple(kinds.values()))
    found = Inputs(
        {NODE if graph.is_plain else kind: graph.nodes_of(kind, drop) for kind in graph.num_nodes},
        {EDGE if graph.is_plain else kind: graph.edges_of(name, drop) for name, kind in kinds.items()},
        LAYOUT,
    )
    return fitting(found, graph.names, folder, drop, time)


@dataclass(frozen=True)
class Metadata:
    """What ``metadata.json`` says.

    Args:
        path: The file.
        said: Its content.
        num_nodes: How many nodes of each type each chunk has.
        num_edges: The same of edges.
    """

    path: Path
    said: Mapping[str, Any]
    num_nodes: Mapping[str, Sequence[int]]
    num_edges: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, path: Path) -> Metadata:
        """Read it."""
        said = read_json(path, "Write it again.")
        kinds = {"node_type": list[str], "edge_type": list[str], "edges": dict[str, object]}
        check_entries(said, kinds, path, _AS_OTHERS)
        for section in ("node_data", "edge_data", "raw_id_mappings", "graph_info"):
            check_entries({section: said.get(section) or {}}, {section: dict[str, object]}, path, _AS_OTHERS)
        made = cls(path, said, _counts(said, "node", path), _counts(said, "edge", path))
        for section, known in (("edges", made.num_edges), ("edge_data", made.num_edges), ("node_data", made.num_nodes)):
            if strange := sorted((said.get(section) or {}).keys() - known.keys()):
                raise ValueError(f"{path}: {section} is of {strange[0]!r}, and the types are {shown(list(known))}.")
        return made

    @property
    def is_plain(self) -> bool:
        """Whether the types have the names that DGL gives to those of a graph without any."""
        return [*self.num_nodes, *self.num_edges] == [DGL_NODE, DGL_EDGE]

    @property
    def kinds(self) -> dict[str, EdgeType]:
        """The edge types by what they are called."""
        return {name: self._kind(name) for name in self.num_edges}

    @property
    def names(self) -> set[str]:
        """What can be left out: the arrays of nodes and edges."""
        of_all = [
            self._said(section, kind) for section in ("node_data", "edge_data") for kind in self.said.get(section) or ()
        ]
        return {name for of_kind in of_all for name in of_kind}

    def nodes_of(self, kind: str, drop: Collection[str]) -> NodeFiles:
        """The nodes of a type."""
        counts, label = self.num_nodes[kind], self._label(kind)
        purposes = {name: "y" if name == label else ALIASES.get(name, name) for name in self._said("node_data", kind)}
        arrays = self._arrays("node_data", kind, counts, purposes, drop)
        return NodeFiles(self.path, None, arrays, sum(counts), ids=self._ids(kind, sum(counts)))

    def edges_of(self, name: str, drop: Collection[str]) -> EdgeFiles:
        """The edges of a type."""
        if name not in self.said["edges"]:
            raise ValueError(f"{self.path}: edges lack {name!r}, one of the edge types: name its files.")
        counts, where = self.num_edges[name], f"{self.path}: edges of {name!r}"
        ends = Chunks.of(self.said["edges"][name], where, self.path.parent, counts, ("csv", "parquet"))
        purposes = {each: self._of_edges(each) for each in self._said("edge_data", name)}
        carried = self._arrays("edge_data", name, counts, purposes, drop)
        return EdgeFiles(files=ends.edges(), num_edges=sum(counts), carried=Carried(carried))

    def _arrays(
        self, section: str, kind: str, counts: Sequence[int], purposes: Mapping[str, str], drop: Collection[str]
    ) -> dict[str, RowFiles]:
        """The arrays of a type by their names in a graph."""
        kept = {name: purpose for name, purpose in purposes.items() if name not in drop}
        check_purposes(kept.items(), self.path)
        said, found = self._said(section, kind), dict[str, RowFiles]()
        for name, purpose in kept.items():
            where = f"{self.path}: {section} of {kind!r}, {name!r}"
            rows = Chunks.of(said[name], where, self.path.parent, counts, FORMATS).rows(purpose)
            found |= {} if rows is None else {purpose: rows}
        return found

    def _said(self, section: str, kind: str) -> Mapping[str, Any]:
        said = (self.said.get(section) or {}).get(kind, {})
        if not isinstance(said, dict):
            raise ValueError(
                f"{self.path}: {section} of {kind!r} must name arrays with their files, got {shown(said)}."
            )
        return said

    def _kind(self, name: str) -> EdgeType:
        parts = name.split(":")
        if len(parts) != 3:
            raise ValueError(
                f"{self.path}: the edge type {name!r} must be <source type>:<name>:<destination type>, as in "
                "author:writes:paper."
            )
        for end in parts[::2]:
            if end not in self.num_nodes:
                raise ValueError(f"{self.path}: {name!r} names {end!r}, and node types are {shown([*self.num_nodes])}.")
        return parts[0], parts[1], parts[2]

    def _of_edges(self, name: str) -> str:
        """What an array of edges is called in the graph."""
        purpose = "edge_attr" if purpose_of(name) == "x" else purpose_of(name)
        return f"edge_{name.removeprefix('edge_')}" if self.is_plain and purpose != "edge_attr" else purpose

    def _label(self, kind: str) -> str | None:
        """The one array of labels of a type, where GraphStorm tells it."""
        told = self.said.get("graph_info") or {}
        pairs = zip(told.get("ntype_label") or (), told.get("ntype_label_property") or (), strict=False)
        names = [name for of, name in pairs if of == kind]
        return names[0] if len(names) == 1 else None

    def _ids(self, kind: str, num_nodes: int) -> Callable[[], Column] | None:
        """What reads the users' ids of the nodes of a type, where GraphStorm keeps them."""
        said = (self.said.get("raw_id_mappings") or {}).get(kind)
        if said is None:
            return None
        where = f"{self.path}: raw_id_mappings of {kind!r}"
        files = Chunks.of(said, where, self.path.parent, (), ("parquet",)).files
        return partial(read_ids, files, where, num_nodes)


def _counts(said: Mapping[str, Any], what: str, path: Path) -> dict[str, list[int]]:
    """How many nodes, or edges, of each type each chunk has."""
    kinds, word = said[f"{what}_type"], f"num_{what}s_per_chunk"
    per_type = said.get(f"num_{what}s_per_type")
    counts: Any = [[count] for count in per_type] if per_type and is_a(list[int], per_type) else []
    counts = said.get(word, counts)
    if not is_a(list[list[int]], counts) or any(count < 0 for of_kind in counts for count in of_kind):
        raise ValueError(f"{path}: {word} must be a list of whole numbers for each type, got {shown(counts)}.")
    if len(counts) != len(kinds) or len({*kinds}) < len(kinds) or not kinds:
        raise ValueError(
            f"{path}: {what}_type names {shown(kinds)}, and {word} has {len(counts)} lists: one for each type, and "
            "each type once."
        )
    return dict(zip(kinds, counts, strict=True))
