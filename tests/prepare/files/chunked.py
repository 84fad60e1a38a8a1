"""Writes a graph as DGL's ``chunk_graph`` and GraphStorm's ``gs-processing`` do, without either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from torch import Tensor
from torch_geometric.data import HeteroData

Format = dict[str, str]
NUMPY, PARQUET = {"name": "numpy"}, {"name": "parquet", "delimiter": ""}
SPACES, COMMAS = {"name": "csv", "delimiter": " "}, {"name": "csv", "delimiter": ","}


def write_chunk(path: Path, rows: Any, form: Format, heading: tuple[str, ...] = ()) -> None:
    """Write some rows of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if form["name"] == "numpy":
        np.save(path, rows)
    elif form["name"] == "csv":
        np.savetxt(path, rows, "%.17g", form["delimiter"])
    elif rows.ndim == 2 and not heading:
        parquet.write_table(pa.table({"value": pa.array(list(rows))}), path)
    else:
        parquet.write_table(pa.table(dict(zip(heading or ("value",), np.atleast_2d(rows.T), strict=True))), path)


def write_chunks(
    folder: Path, name: str, rows: Any, counts: list[int], form: Format, heading: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Write all rows in chunks, and return what ``metadata.json`` says of them."""
    suffix = {"numpy": "npy", "csv": "txt", "parquet": "parquet"}[form["name"]]
    ends = np.cumsum(counts)
    files = [f"{name.replace(':', '_')}/part-{at}.{suffix}" for at in range(len(counts))]
    for file, end, count in zip(files, ends, counts, strict=True):
        write_chunk(folder / file, rows[end - count : end], form, heading)
    return {"format": form, "data": files}


def write_graph(folder: Path, data: HeteroData, counts_of: dict[str, list[int]], edges: Format, arrays: Format) -> Path:
    """Write a graph with types; of edges a third is in the first of two chunks."""
    said: dict[str, Any] = {"graph_name": "small", "node_type": data.node_types, "edge_type": []}
    said |= {"num_nodes_per_chunk": [counts_of[kind] for kind in data.node_types], "num_edges_per_chunk": []}
    said |= {"edges": {}, "node_data": {}, "edge_data": {}}
    for kind in data.node_types:
        said["node_data"][kind] = {
            name: write_chunks(folder, f"node_data/{kind}-{name}", _plain(array), counts_of[kind], arrays)
            for name, array in data[kind].to_dict().items()
            if isinstance(array, Tensor)
        }
    for edge_type in data.edge_types:
        name, ends = ":".join(edge_type), data[edge_type].edge_index.numpy().T
        counts = [len(ends) // 3, len(ends) - len(ends) // 3]
        said["edge_type"].append(name)
        said["num_edges_per_chunk"].append(counts)
        said["edges"][name] = write_chunks(folder, f"edges/{name}", ends, counts, edges, ("src_int_id", "dst_int_id"))
        said["edge_data"][name] = {
            each: write_chunks(folder, f"edge_data/{name}-{each}", _plain(array), counts, arrays)
            for each, array in data[edge_type].to_dict().items()
            if each != "edge_index"
        }
    (folder / "metadata.json").write_text(json.dumps(said))
    return folder


def _plain(array: Tensor) -> Any:
    """Masks as zeros and ones, as GraphStorm writes them."""
    return (
        array.numpy().astype(np.int8)
        if array.dtype.is_floating_point is False and array.dtype.itemsize == 1
        else array.numpy()
    )
