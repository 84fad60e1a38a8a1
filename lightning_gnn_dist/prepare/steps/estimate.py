"""How much disk and time preparing a graph, or a shard of it, takes, from the headers of its files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles
from lightning_gnn_dist.prepare.tables.reading import count_columns, count_rows

SECONDS_PER_KEY = 150e-9  # an edge has one key per direction; measured on one core: benchmarks/scale.md
SECONDS_PER_LINE = 600e-9  # in addition, for a table of text
SECONDS_PER_EDGE = 60e-9  # to read an edge of another shard
KEY_BYTES = 8  # of an edge in a bucket
TYPE_BYTES = 1  # of an edge in a graph with types, beside its sender
ENDS_BYTES = 16  # of an edge that is taken out of its files, at most
CELL_BYTES = 4  # of a table


@dataclass(frozen=True)
class Estimate:
    """What preparing will take, about.

    Args:
        num_edges: Number of edges in the files.
        disk_bytes: Bytes of disk that the work takes.
        stored_bytes: Bytes of what is written, at most.
        seconds: Time in all, if the disk keeps up.
    """

    num_edges: int
    disk_bytes: int
    stored_bytes: int
    seconds: float

    def check_room(self, folder: Path) -> None:
        """Refuse to begin the work in a folder if its disk has too little room for what is not there yet."""
        place = next(parent for parent in folder.parents if parent.exists())
        there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        missing, free = self.disk_bytes - there, shutil.disk_usage(place).free
        if missing > free:
            raise OSError(f"{place} has {free:,} bytes free, and about {missing:,} are needed: choose another disk.")


def estimate_of(inputs: Inputs, directions: int, num_shards: int | None, num_readers: int = 1) -> Estimate:
    """The estimate for the whole graph, or for one of so many shards, as if all were of one size.

    Args:
        inputs: The files.
        directions: 2 if each edge is added the other way round, otherwise 1.
        num_shards: The number of shards, or None for the whole graph.
        num_readers: How many share the reading of all edges.
    """
    counts = [_nodes_of(files) for files in inputs.nodes.values()]
    num_nodes, of_tables, arrays = (sum(counted) for counted in zip(*counts, strict=True))
    nodes, num_edges = arrays + of_tables + 8 * num_nodes, sum(files.num_edges for files in inputs.edges.values())
    per_edge = (4 if convert.index_dtype(num_nodes) == torch.int32 else 8) + TYPE_BYTES * inputs.have_names
    disk, stored, seconds, share = 0, 0, 0.0, num_shards or 1
    for files in inputs.edges.values():
        num_keys, carried = files.num_edges * directions, _carried(files)
        per_key = KEY_BYTES + carried
        if num_shards or not files.are_arrays:  # they are written into arrays before they are sorted
            per_key += ENDS_BYTES + carried
        if inputs.have_names:  # sorted by type, and then all types together
            per_key += 2 * (per_edge + carried)
        disk += num_keys * per_key
        stored += num_keys * (per_edge + carried)
        seconds += num_keys * (SECONDS_PER_KEY + SECONDS_PER_LINE * files.has_text)
    return Estimate(
        num_edges=num_edges,
        disk_bytes=(nodes + 8 * num_nodes + disk) // share + of_tables,
        stored_bytes=(nodes + stored) // share,
        seconds=seconds / share + SECONDS_PER_EDGE * num_edges / num_readers * (num_shards is not None),
    )


def _nodes_of(files: NodeFiles) -> tuple[int, int, int]:
    """How many nodes a type has, if that is known, the bytes of its table as arrays, and those of other arrays."""
    others = sum(rows.num_bytes for rows in files.arrays.values())
    if files.table is None:
        return files.num_nodes or 0, 0, others
    num_rows = count_rows(files.table)
    return num_rows, CELL_BYTES * num_rows * count_columns(files.table), others


def _carried(files: EdgeFiles) -> int:
    """The bytes that an edge carries."""
    return files.carried.bytes_per_edge + CELL_BYTES * len(files.columns)
