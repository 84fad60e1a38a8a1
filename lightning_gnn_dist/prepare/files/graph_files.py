"""A graph in files that are read in pieces: its edges, and arrays per node and per edge."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, number_in, purpose_of
from lightning_gnn_dist.prepare.files.raw import check_drop, check_purposes
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles


@dataclass(frozen=True)
class GraphFiles:
    """A graph in files of which only headers were read.

    Args:
        edges: The edges.
        arrays: The arrays per node, and lists of nodes (``train_idx``), by their names in a graph.
        carried: The arrays per edge.
        num_nodes: The number of nodes; ``None`` if only the edges tell.
    """

    edges: EdgeFiles
    arrays: dict[str, RowFiles]
    carried: Carried
    num_nodes: int | None

    @classmethod
    def of(cls, source: Path, drop: Collection[str] = ()) -> GraphFiles:
        """The graph at ``source``: a folder with ``edge_index`` and arrays, or edges alone."""
        found = entries(source) if source.is_dir() else {}
        if "edge_index" not in found:
            return cls(EdgeFiles.of(source, drop), {}, Carried({}), None)
        check_drop(drop, found, source)
        edges = EdgeFiles.of(found.pop("edge_index"))
        return cls(edges, {}, Carried({}), None)._with(
            {name: path for name, path in found.items() if name not in drop}, source
        )

    def with_arrays(self, folder: Path, drop: Collection[str] = ()) -> GraphFiles:
        """The same graph with the arrays of a folder in addition."""
        return self._with({name: path for name, path in entries(folder).items() if name not in drop}, folder)

    def _with(self, found: dict[str, Path], where: Path) -> GraphFiles:
        files = {name: RowFiles.of(path) for name, path in found.items()}
        arrays = {ALIASES.get(name, name): rows for name, rows in files.items()}
        check_purposes(((name, purpose_of(name)) for name in (*files, *self.arrays, *self.carried.arrays)), where)
        carried = {name: arrays.pop(name) for name in list(arrays) if name.startswith("edge_")}
        for name, rows in carried.items():
            if rows.shape[:1] != (self.edges.num_edges,) or self.edges.has_text:
                raise ValueError(
                    f"{name} has shape {rows.shape}, and there are {self.edges.num_edges} edges"
                    f"{' in text, which can carry nothing here' if self.edges.has_text else ''}: leave it out (--drop)."
                )
        num_nodes = _num_nodes(arrays) if self.num_nodes is None else self.num_nodes
        convert.check_names(arrays, carried)
        return GraphFiles(self.edges, self.arrays | arrays, Carried(self.carried.arrays | carried), num_nodes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays per node."""
        return sum(rows.num_bytes for rows in self.arrays.values())


def entries(folder: Path) -> dict[str, Path]:
    """Arrays by name: ``x.npy``, or ``x/`` with several files."""
    folders = [path for path in folder.iterdir() if path.is_dir() and any(path.iterdir())]
    files = [path for path in folder.glob("*.npy") if not path.is_dir()]
    for path in (path for path in files if path.with_suffix("") in folders):
        raise ValueError(f"{path} and the folder {path.with_suffix('')} hold the same array: remove one of them.")
    return {path.stem: path for path in sorted([*files, *folders], key=lambda path: path.stem)}


def _num_nodes(arrays: dict[str, RowFiles]) -> int | None:
    if "num_nodes" in arrays:
        rows = arrays.pop("num_nodes")
        return number_in(rows.load(), rows.files[0].path)
    for name, array in arrays.items():
        if not array.shape:
            raise ValueError(f"{name}.npy holds a single number, and needs a row for each node or edge.")
    return next((arrays[name].shape[0] for name in ("x", "y", "train_mask") if name in arrays), None)
