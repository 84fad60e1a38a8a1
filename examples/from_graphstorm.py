"""A chunked graph of DGL or GraphStorm, a folder with a ``metadata.json``, as a saved graph.

    python from_graphstorm.py my_chunks my_graph

Nodes keep their numbers. Types called ``_N`` and ``_N:_E:_N``, DGL's names of none, are no types.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist import prepare_graph

Array = np.ndarray[Any, Any]
ENDS = "edge_index"


def chunks(folder: Path, said: dict[str, Any], dtype: Any = np.float64) -> Iterator[Array]:
    """The rows in each file that has any."""
    for file in (folder / name for name in said["data"]):
        if said["format"]["name"] == "numpy":
            rows = np.load(file, mmap_mode="r")
        elif said["format"]["name"] == "parquet":
            from pyarrow import parquet

            columns = (column.combine_chunks() for column in parquet.read_table(file).columns)
            rows = np.column_stack([np.array(column.to_pylist()) for column in columns])
        else:
            rows = np.loadtxt(file, dtype, delimiter=said["format"].get("delimiter") or ",", ndmin=2)
        if len(rows):
            yield rows


def write(place: Path, rows: Iterator[Array], name: str) -> None:
    """Write an array in as many files as it has chunks: a single column as one number for each row."""
    (place / name).mkdir(parents=True)
    for at, chunk in enumerate(rows):
        array = chunk[:, 0] if chunk.ndim == 2 and chunk.shape[1] == 1 and name != "feat" else np.asarray(chunk)
        if name in ("y", "label") and array.dtype.kind in "fO":  # a class, or -1 where there is none
            array = np.nan_to_num(array.astype(np.float64), nan=-1).astype(np.int64)
        array = array.astype(bool) if name.endswith("_mask") else array
        np.save(place / name / f"{at:05}.npy", np.ascontiguousarray(array.T if name == ENDS else array))
    if name == ENDS and not any((place / name).iterdir()):  # no edges of this type
        np.save(place / name / "none.npy", np.empty((2, 0), np.int64))


def convert(folder: Path, work: Path) -> None:
    """Write all arrays into ``work``."""
    said = json.loads((folder / "metadata.json").read_text())
    info, is_plain = said.get("graph_info") or {}, [*said["node_type"], *said["edge_type"]] == ["_N", "_N:_E:_N"]
    labels = dict(zip(info.get("ntype_label") or (), info.get("ntype_label_property") or (), strict=False))
    for kind, counts in zip(said["node_type"], said["num_nodes_per_chunk"], strict=True):
        place = work if is_plain else work / "nodes" / kind
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / "num_nodes.npy", sum(counts))
        for name, files in said.get("node_data", {}).get(kind, {}).items():
            write(place, chunks(folder, files), "y" if name == labels.get(kind) else name)
    for kind in said["edge_type"]:
        place = work if is_plain else work / "edges" / kind.replace(":", "__")
        write(place, chunks(folder, said["edges"][kind], np.int64), ENDS)
        for name, files in (said.get("edge_data") or {}).get(kind, {}).items():
            told = "edge_attr" if name == "feat" else f"edge_{name.removeprefix('edge_')}" if is_plain else name
            write(place, chunks(folder, files), told)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    convert(given.folder, work := given.out.with_name(given.out.name + "_arrays"))
    prepare_graph(work, given.out)
    shutil.rmtree(work)
