"""How much disk and time preparing a graph, or a shard of it, takes, from the headers of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.files.inputs import Inputs
from lightning_gnn_dist.prepare.files.table_files import columns_of, count_columns, count_rows

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
        headings: What is taken for the headings of tables, in words.
    """

    num_edges: int
    disk_bytes: int
    stored_bytes: int
    seconds: float
    headings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Size:
    """The edges of one type: how many, the bytes that each carries, those of one taken out, and if lines are read."""

    num_edges: int
    carried: int
    taken_out: int
    is_read_as_text: bool


def estimate_of(inputs: Inputs, ways: int, num_shards: int | None) -> Estimate:
    """The estimate for the whole graph, or for one of so many shards, as if all were of one size.

    Args:
        inputs: The files.
        ways: 2 if each edge is added the other way round, otherwise 1.
        num_shards: The number of shards, or None for the whole graph.
    """
    counts = [_nodes_of(inputs, kind) for kind in inputs.nodes]
    num_nodes, of_tables, arrays = (sum(counted) for counted in zip(*counts, strict=True))
    sizes = [_size_of(inputs, edge_type, num_shards is not None) for edge_type in inputs.edges]
    keys = [(size.num_edges * ways, size) for size in sizes]
    per_edge = (4 if convert.index_dtype(num_nodes) == torch.int32 else 8) + TYPE_BYTES * inputs.have_names
    again = 2 * inputs.have_names  # sorted by type, and then all types together
    nodes, num_edges = arrays + of_tables + 8 * num_nodes, sum(size.num_edges for size in sizes)
    disk = [n * (KEY_BYTES + size.carried + size.taken_out + again * (per_edge + size.carried)) for n, size in keys]
    seconds = [n * (SECONDS_PER_KEY + SECONDS_PER_LINE * size.is_read_as_text) for n, size in keys]
    share = num_shards or 1
    return Estimate(
        num_edges=num_edges,
        disk_bytes=(nodes + 8 * num_nodes + sum(disk)) // share + of_tables,
        stored_bytes=(nodes + sum(n * (per_edge + size.carried) for n, size in keys)) // share,
        seconds=sum(seconds) / share + SECONDS_PER_EDGE * num_edges * (num_shards is not None),
        headings=inputs.headings,
    )


def _nodes_of(inputs: Inputs, kind: str) -> tuple[int, int, int]:
    """How many nodes a type has, if that is known, the bytes of its table as arrays, and those of other arrays."""
    table = inputs.table_of_nodes(kind)
    if table is not None:
        others = 0 if inputs.plain is None else inputs.plain.num_bytes
        return count_rows(table), CELL_BYTES * count_rows(table) * count_columns(table), others
    files = inputs.nodes_of(kind, Path())
    return files.num_nodes or 0, 0, files.num_bytes


def _size_of(inputs: Inputs, edge_type: EdgeType, gathers: bool) -> _Size:
    """The edges of one type; an estimate for text."""
    path = inputs.edges[edge_type]
    if inputs.have_names and inputs.has_table_of_edges(edge_type):
        carried = CELL_BYTES * sum(name not in inputs.drop for name in columns_of(path)[2:])
        return _Size(count_rows(path), carried, ENDS_BYTES + carried, True)
    files = inputs.edges_of(edge_type)
    carried = files.carried.bytes_per_edge + CELL_BYTES * len(files.edges.carried)
    gathers = gathers or inputs.has_table_of_edges(edge_type)
    return _Size(files.edges.num_edges, carried, (ENDS_BYTES + carried) * gathers, files.edges.has_text)
