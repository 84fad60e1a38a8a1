"""Finds out what a path holds: a PyG file, arrays, or tables of edges and nodes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lightning_gnn_dist.prepare.files.from_arrays import of_directory, of_npz, of_pyg
from lightning_gnn_dist.prepare.files.from_tables import of_tables
from lightning_gnn_dist.prepare.files.raw import Source
from lightning_gnn_dist.prepare.files.table_files import is_table


def find_source(path: Path, *, nodes: Path | None = None, drop: Collection[str] = ()) -> Source:
    """The source of a graph at ``path``. Nothing large is read yet.

    Args:
        path: A PyG ``.pt``, an ``.npz``, a directory of ``.npy``, or a table of edges: text, or Parquet in one file or
            a folder of several.
        nodes: The table of nodes that goes with a table of edges.
        drop: Columns or arrays to leave out.
    """
    for file in (path, *([nodes] if nodes else [])):
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist.")
    if (path / "meta.json").exists():
        raise ValueError(f"{path} is a saved graph already: Graph.open(path) reads it.")
    has_rows = is_table(path)
    if nodes is not None and not has_rows:
        raise ValueError(f"A table of nodes ({nodes}) goes with a table of edges, and {path} is none.")
    if has_rows:
        return of_tables(path, nodes, drop)
    if path.suffix in {".pt", ".pth"}:
        return of_pyg(path, drop)
    if path.is_dir() and any(path.glob("*.npy")):
        return of_directory(path, drop)
    if path.suffix == ".npz":
        return of_npz(path, drop)
    raise ValueError(
        f"{path} is no graph that is known here: give a PyG file (.pt), an .npz or a directory of .npy with an "
        "edge_index, or a table of edges (.csv, .tsv, .txt, also gzipped, or .parquet, also a folder of these)."
    )
