"""The folder that ``torch_geometric.distributed.Partitioner`` writes: parts of nodes, each with the edges into them.

META.json                                       how many parts there are, and the types
node_map.pt, edge_map.pt, one for each type     the part of each node, and of each edge
part_0/graph.pt                                 ends of edges, by the nodes' numbers in the whole graph
part_0/node_feats.pt, edge_feats.pt             rows of nodes, with these numbers, and of edges

Nothing of the files is run, and tensors are mapped. Nodes keep their numbers, and their part is the array ``part``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.files import check_entries, read_json
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.prepare.files.arrays import entries
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.inputs import EDGE, NODE, Inputs, NodeFiles, fitting
from lightning_gnn_dist.prepare.files.row_files import Carried, LoadedArray, RowFiles

META, PART = "META.json", "part"
GRAPH, NODE_ROWS, EDGE_ROWS = FILES = "graph.pt", "node_feats.pt", "edge_feats.pt"
LAYOUT = f"a folder of PyG's Partitioner ({META})"
_AGAIN = "Partition the graph again."


@dataclass(frozen=True, eq=False)
class Ends(NpyFile):
    """The senders and receivers in one part, as an array of shape (2, E).

    Args:
        both: The senders, and the receivers.
    """

    both: tuple[Column, Column]

    def read(self, first: int, count: int) -> Column:
        total = self.shape[1]
        return self.both[first >= total][first % max(total, 1) :][:count]


@dataclass(frozen=True, eq=False)
class PartRows(NpyFile):
    """An array of which each part has the rows of its nodes, read in the order of all nodes.

    Args:
        ids: The nodes of each part, in order.
        places: Where the row of each is in its part.
        rows: The rows of each part.
    """

    ids: Sequence[Column]
    places: Sequence[Column]
    rows: Sequence[NpyFile]

    @property
    def type(self) -> torch.dtype:
        return self.rows[0].type

    def read(self, first: int, count: int) -> Column:
        width = max(int(np.prod(self.shape[1:])), 1)
        start, end = first // width, (first + count) // width
        found = np.empty((end - start, width), self.dtype)
        for ids, places, rows in zip(self.ids, self.places, self.rows, strict=True):
            own = slice(*np.searchsorted(ids, [start, end]))
            found[ids[own] - start] = rows.read(0, len(ids) * width).reshape(-1, width)[places[own]]
        return found.reshape(-1)


@dataclass(frozen=True)
class PartitionFolder:
    """What a folder holds; types without names where there are none.

    Args:
        folder: The folder.
        node_types: The types of nodes.
        edge_types: The types of edges.
        parts: Of each part the content of each of ``FILES``, by types.
    """

    folder: Path
    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    parts: Sequence[Mapping[str, Mapping[Any, Any]]]

    @classmethod
    def of(cls, folder: Path) -> PartitionFolder:
        """Map the files."""
        file = folder / META
        about = read_json(file, _AGAIN)
        kinds: dict[str, Any] = {"num_parts": int, "is_hetero": bool}
        kinds |= {"node_types": list[str], "edge_types": list[list[str]]} if about.get("is_hetero") else {}
        check_entries(about, kinds, file, _AGAIN)
        loaded = [{name: _load(folder / f"part_{at}" / name) for name in FILES} for at in range(about["num_parts"])]
        if not about["is_hetero"]:
            kind_of: dict[str, Any] = {GRAPH: EDGE, NODE_ROWS: NODE, EDGE_ROWS: EDGE}
            parts = [{name: {kind_of[name]: held} for name, held in part.items()} for part in loaded]
            return cls(folder, (NODE,), (EDGE,), parts)
        node_types, edge_types = tuple(about["node_types"]), tuple(map(tuple, about["edge_types"]))
        check_names(node_types, edge_types)
        return cls(folder, node_types, edge_types, loaded)

    def nodes_of(self, kind: str) -> NodeFiles:
        """The nodes of a type, in their order in the whole graph."""
        file, part_of = self._map("node_map", kind)
        held = [self._held(at, NODE_ROWS, kind) for at in range(len(self.parts))]
        ids = [_column(each.get("id", each.get("global_id"))) for each in held]
        places = [np.argsort(each, kind="stable") for each in ids]
        in_order = [each[order] for each, order in zip(ids, places, strict=True)]
        if not np.array_equal(np.sort(np.concatenate(ids)), np.arange(len(part_of))):
            raise ValueError(f"{file} is of {len(part_of):,} nodes, and the parts beside it hold others. {_AGAIN}")
        arrays = {PART: RowFiles.of(LoadedArray.of_array(file, part_of))}
        for name, rows in self._rows(held, NODE_ROWS, ids).items():
            own = [at for at, each in enumerate(ids) if each.size]
            shape = len(part_of), *rows.shape[1:]
            of_parts = [in_order[at] for at in own], [places[at] for at in own], rows.files
            arrays[name] = RowFiles.of(PartRows(file, shape, rows.files[0].dtype, 0, False, *of_parts))
        of_all = {name: value for name, value in (held[0] if held else {}).items() if name == "time"}
        arrays |= {name: RowFiles.of(LoadedArray.of_array(file, value)) for name, value in of_all.items()}
        return NodeFiles(self.folder, None, arrays, len(part_of))

    def edges_of(self, kind: EdgeType) -> EdgeFiles:
        """The edges of a type, part after part."""
        file, part_of = self._map("edge_map", kind)
        graphs = [self._held(at, GRAPH, kind) for at in range(len(self.parts))]
        ids = [_column(graph.get("edge_id")) for graph in graphs]
        if sum(each.size for each in ids) != len(part_of):
            raise ValueError(f"{file} is of {len(part_of):,} edges, and the parts beside it hold others. {_AGAIN}")
        files = []
        for at, (graph, each) in enumerate(zip(graphs, ids, strict=True)):
            both = _column(graph.get("row")), _column(graph.get("col"))
            place = self.folder / f"part_{at}" / GRAPH
            if {column.size for column in both} != {each.size}:
                raise ValueError(f"{place} holds {each.size:,} edges, and other numbers of ends. {_AGAIN}")
            files.append(Ends(place, (2, each.size), np.dtype(np.int64), 0, False, both))
        held = [self._held(at, EDGE_ROWS, kind) for at in range(len(self.parts))]
        carried = Carried(self._rows(held, EDGE_ROWS, ids))
        return EdgeFiles(files=tuple(files), num_edges=len(part_of), carried=carried)

    def _held(self, at: int, name: str, kind: str | EdgeType) -> Mapping[str, Any]:
        """What a file of a part holds of a type: nothing, where it has no such rows."""
        found = self.parts[at][name].get(kind, {})
        if not isinstance(found, dict):
            raise ValueError(f"{self.folder / f'part_{at}' / name} holds {type(found).__name__} of {kind!r}. {_AGAIN}")
        return found

    def _rows(self, held: Sequence[Mapping[str, Any]], file: str, ids: Sequence[Column]) -> dict[str, RowFiles]:
        """Arrays by name, of the parts that have rows at all."""
        of_parts = [(each.get("feats") or {}) | _times(each, file) for each in held]
        found = {}
        for name in {name for each in of_parts for name, rows in each.items() if rows is not None}:
            arrays = []
            for at, (each, own) in enumerate(zip(of_parts, ids, strict=True)):
                place = self.folder / f"part_{at}" / file
                rows: Any = each.get(name) if isinstance(each.get(name), Tensor) else torch.empty(0)
                if own.size and len(rows) != own.size:
                    raise ValueError(f"{place} holds {len(rows):,} rows of {name!r}, not {own.size:,}. {_AGAIN}")
                arrays += [LoadedArray.of_array(place, rows)] if own.size else []
            found[name] = RowFiles.of_files(arrays)
        return dict(sorted(found.items()))

    def _map(self, name: str, kind: str | EdgeType) -> tuple[Path, Tensor]:
        """The part of each node, or edge, of a type, and the file that says so."""
        word = kind if isinstance(kind, str) else "__".join(kind)
        file = self.folder / name / f"{word}.pt" if any(kind) else self.folder / f"{name}.pt"
        found = _load(file)
        if not isinstance(found, Tensor) or found.dim() != 1:
            raise ValueError(f"{file} must hold the part of each, one number for each. {_AGAIN}")
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < len(self.parts):
            raise ValueError(f"{file} names part {int(found.max())}, and there are {len(self.parts)}. {_AGAIN}")
        return file, found


def is_partitioned(folder: Path) -> bool:
    """Whether PyG has written a folder."""
    return (folder / META).is_file() and (folder / "part_0").is_dir()


def inputs_of_partition(folder: Path, nodes: Path | None, drop: frozenset[str], time: str | None) -> Inputs:
    """The files of a partitioned graph.

    Args:
        folder: What PyG wrote.
        nodes: More arrays of nodes, such as labels and masks, which PyG leaves out: a folder or ``.npz``, of several
            types a folder with one for each.
        drop: Arrays to leave out.
        time: The array of times, if there is one.
    """
    graph = PartitionFolder.of(folder)
    of_nodes = {kind: graph.nodes_of(kind) for kind in graph.node_types}
    for kind, place in _more(nodes, graph.node_types).items():
        of_nodes[kind] = of_nodes[kind].beside(NodeFiles.of(place, entries(place)).arrays)
    of_edges = {kind: graph.edges_of(kind) for kind in graph.edge_types}
    names = {name for files in of_nodes.values() for name in files.arrays}
    names |= {name for files in of_edges.values() for name in files.carried.arrays}
    found = Inputs(
        {kind: replace(files, arrays=_kept(files.arrays, drop)) for kind, files in of_nodes.items()},
        {kind: replace(of, carried=Carried(_kept(of.carried.arrays, drop))) for kind, of in of_edges.items()},
        LAYOUT,
    )
    return fitting(found, names, folder, drop, time)


def _kept(arrays: Mapping[str, RowFiles], drop: Collection[str]) -> dict[str, RowFiles]:
    return {name: rows for name, rows in arrays.items() if name not in drop}


def _more(nodes: Path | None, kinds: Collection[str]) -> dict[str, Path]:
    """Where more arrays of each type are."""
    if nodes is None:
        return {}
    if not nodes.exists():
        raise FileNotFoundError(f"{nodes} does not exist.")
    if kinds == (NODE,):
        return {NODE: nodes}
    found = {place.stem: place for place in sorted(nodes.iterdir())} if nodes.is_dir() else {}
    if not found or (strange := sorted(found.keys() - {*kinds})):
        told = strange[0] if found else "none"
        raise ValueError(
            f"{nodes} must hold a folder or .npz of arrays for node types ({shown(list(kinds))}), got {told}."
        )
    return found


def _times(held: Mapping[str, Any], file: str) -> dict[str, Tensor]:
    """The times of edges, which lie beside their rows. Those of nodes are of the whole graph in every part."""
    return {"edge_time": held["edge_time"]} if file == EDGE_ROWS and "edge_time" in held else {}


def _column(ids: Any) -> Column:
    return np.asarray(ids) if isinstance(ids, Tensor) else np.empty(0, np.int64)


def _no_code(*_: Any) -> OrderedDict[Any, Any]:
    """Stands for the ``defaultdict`` of rows of edges, which torch does not fill without running code."""
    return OrderedDict()


def _load(file: Path) -> Any:
    others = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()  # PyG has added the defaultdict itself
        torch.serialization.add_safe_globals([(dict, "builtins.dict"), (_no_code, "collections.defaultdict")])
        return torch.load(file, mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing. {_AGAIN}") from error
    except Exception as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file} cannot be read without running code out of it ({told:.200}). {_AGAIN}") from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(others)
