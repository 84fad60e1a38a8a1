"""How much disk and time preparing a graph with types takes, from the headers of its files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lightning_gnn_dist.prepare.files.table_files import columns_of, count_rows, is_table
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables
from lightning_gnn_dist.prepare.prepare_graph import SECONDS_PER_KEY, SECONDS_PER_LINE, Estimate
from lightning_gnn_dist.prepare.typed.edges import edge_files
from lightning_gnn_dist.prepare.typed.nodes import nodes_files

KEY_BYTES, EDGE_BYTES = 8, 5  # of an edge in a bucket, and in the graph
ENDS_BYTES = 16  # of an edge that is taken out of a table, at most
CELL_BYTES = 4  # of a table


def estimate_of(tables: TypedTables, reverse: bool, gathers: bool = False) -> Estimate:
    """The estimate for the whole graph.

    Args:
        tables: The tables and arrays.
        reverse: Whether each edge type has a reverse one.
        gathers: Whether arrays of edges are written again before they are sorted.
    """
    nodes = sum(_num_bytes(path, tables.drop) for path in tables.nodes.values())
    found = [_size_of(path, tables.drop, gathers) for path in tables.edges.values()]
    sizes = [(count * (1 + reverse), more, ends) for count, more, ends in found]
    return Estimate(
        num_edges=sum(count for count, *_ in sizes),
        disk_bytes=nodes + sum(c * (KEY_BYTES + 2 * EDGE_BYTES + 3 * more + ends) for c, more, ends in sizes),
        stored_bytes=nodes + sum(count * (EDGE_BYTES + more) for count, more, _ in sizes),
        seconds=sum(count * (SECONDS_PER_KEY + SECONDS_PER_LINE * (ends > 0)) for count, _, ends in sizes),
        headings=tables.headings,
    )


def _num_bytes(nodes: Path, drop: Collection[str]) -> int:
    """Bytes of the arrays of one node type; an estimate for text."""
    if is_table(nodes):
        return CELL_BYTES * count_rows(nodes) * len(columns_of(nodes))
    return nodes_files(nodes, drop).num_bytes


def _size_of(edges: Path, drop: Collection[str], gathers: bool) -> tuple[int, int, int]:
    """The edges of one type, an estimate for text, the bytes that each carries, and those of what is taken out."""
    if is_table(edges):
        carried = CELL_BYTES * sum(name not in drop for name in columns_of(edges)[2:])
        return count_rows(edges), carried, ENDS_BYTES + carried
    files = edge_files(edges, drop)
    carried = files.carried.bytes_per_edge
    return files.edges.num_edges, carried, (ENDS_BYTES + carried) * gathers
