"""The nodes of one type: their arrays in files, into which tables are turned in pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.storage.npy import save
from lightning_gnn_dist.prepare.files.from_tables import id_of, node_columns, times_of
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.table_files import columns_of
from lightning_gnn_dist.prepare.files.table_pieces import GrowingArrays, TablePieces
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.numbering import Part
from lightning_gnn_dist.prepare.prepare_graph import Preparation


@dataclass(frozen=True, kw_only=True)
class NodesOfType(Preparation):
    """Copies the arrays of one node type into ``draft``."""

    draft: Path

    @property
    def _draft(self) -> Path:
        return self.draft

    def copy(self, files: GraphFiles, count: int, journal: Journal, progress: Progress) -> None:
        """Copy all arrays, as far as the journal does not say that they were."""
        (self.draft / "nodes").mkdir(parents=True, exist_ok=True)
        self._write_arrays(files, count, journal, progress)


def nodes_files(path: Path, drop: Collection[str]) -> GraphFiles:
    """The arrays of one node type, in a folder."""
    check_folder_of_arrays(path)
    return GraphFiles.of_nodes(path, drop)


def check_folder_of_arrays(path: Path) -> None:
    """Refuse what is no folder."""
    if not path.is_dir():
        raise ValueError(
            f"{path} is read in memory alone: to work with less, unpack it to a folder of .npy, or leave --out-of-core "
            "(or --shard) out."
        )


def unpack_nodes(
    path: Path,
    folder: Path,
    part_of: Callable[[int], Part],
    drop: Collection[str],
    time: str | None,
    memory_bytes: int,
    progress: Progress,
) -> None:
    """Turn a table of nodes into arrays.

    Args:
        path: The table.
        folder: Gets ``ids.npy``, of all nodes; in ``own`` the features of the nodes of the part; in ``arrays`` all
            other arrays, of all nodes.
        part_of: Returns the part whose features to keep, for the number of nodes.
        drop: Columns to leave out, but for the ids.
        time: The column of times, if there is one.
        memory_bytes: Bytes that a piece of the table may take.
        progress: Called with the share that is done.
    """
    names, ids = columns_of(path), id_of(columns_of(path))
    kept = [name for name in names if name not in drop or name == ids]
    table = TablePieces.of(path, kept, memory_bytes, lambda share: progress(share / 2))
    own = part_of(table.num_rows).nodes
    features, others, of_ids = GrowingArrays(folder / "own", path), GrowingArrays(folder / "arrays", path), []
    for first, piece in table:
        of_ids.append(piece.pop(ids))
        if time is not None and time in piece:
            others.add({time: times_of(time, piece.pop(time), path, first)})
        made = node_columns(piece, path, first)
        if "x" in made:
            start, end = np.searchsorted(own, [first, first + len(of_ids[-1])])
            features.add({"x": made.pop("x")[own[start:end] - first]})
        others.add(made)
        progress((1 + (first + len(of_ids[-1])) / table.num_rows) / 2)
    features.finish()
    others.finish()
    save(folder / "ids.npy", np.concatenate(of_ids))
    save(folder / "arrays" / "num_nodes.npy", np.array(table.num_rows))
