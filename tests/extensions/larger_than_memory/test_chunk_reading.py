"""Chunks that are read from files are the graph among their nodes, and files that changed are refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph
from lightning_gnn_dist.extensions.larger_than_memory import chunk_reading
from lightning_gnn_dist.extensions.larger_than_memory.chunk_reading import ChunkReader
from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, row_slices
from lightning_gnn_dist.partition.saved_chunks import Chunks
from tests.graph.equal import check_equal
from tests.graph.parted import small_graph, some_partition, typed_graph_of_widths, uneven_partition


def saved(graph: Graph, folder: Path) -> Graph:
    partition = some_partition(graph, 9) if graph.num_nodes > 100 else uneven_partition(graph, 5)
    reorder_graph(graph, partition, folder / "graph")
    return Graph.open(folder / "graph")


def reader_of(graph: Graph) -> ChunkReader:
    chunks = Chunks.of(graph)
    assert chunks is not None
    return ChunkReader(graph, chunks)


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("edges_per_piece", [1, 50, EDGES_PER_PIECE])
def test_chunks_are_the_graph_among_their_nodes(
    is_typed: bool, edges_per_piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_gnn_dist.graph.rows.EDGES_PER_PIECE", edges_per_piece)
    monkeypatch.setattr(chunk_reading, "row_slices", row_slices)
    graph = saved(typed_graph_of_widths() if is_typed else small_graph(edge_arrays=True), tmp_path)
    chunks = Chunks.of(graph)
    assert chunks is not None
    chunk = chunks.partition().assignment
    for held in ([0], [1, 2, 4], [4, 0], range(chunks.num_chunks)):
        part, nodes, num_bytes = reader_of(graph).read([*held])
        expected = torch.isin(chunk, torch.tensor([*held]).int()).nonzero().view(-1)
        assert nodes.equal(expected)
        check_equal(part, graph.induced(expected))
        rows = graph.indptr.diff()[expected].sum()
        assert num_bytes >= 4 * rows + sum(a.nbytes for of in part.types.node_arrays.values() for a in of.values())


def test_a_graph_in_halves_is_read(tmp_path: Path) -> None:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].bfloat16()
    found = saved(graph, tmp_path)
    part, nodes, _ = reader_of(found).read([1, 3])
    assert part.node_arrays["x"].equal(found.node_arrays["x"][nodes])


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    graph = saved(small_graph(), tmp_path)
    file = tmp_path / "graph" / "nodes" / "x.npy"
    file.chmod(0o644)
    reader = reader_of(graph)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"x.npy was changed or replaced while the graph was trained on"):
        reader.read([8])
    with pytest.raises(ValueError, match=r"x.npy is truncated: it has .* bytes, and its header promises"):
        reader_of(graph)


def test_a_file_that_gets_shorter_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, preadv = reader_of(saved(small_graph(), tmp_path)), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, out, at: 0 if at > 5000 else preadv(file, out, at))
    with pytest.raises(ValueError, match="became shorter while it was read"):
        reader.read([8])


def test_a_replaced_file_is_refused(tmp_path: Path) -> None:
    graph = saved(small_graph(), tmp_path)
    reader, file = reader_of(graph), tmp_path / "graph" / "nodes" / "x.npy"
    np.save(tmp_path / "other.npy", np.load(file))
    os.replace(tmp_path / "other.npy", file)
    with pytest.raises(ValueError, match=r"x.npy was changed or replaced"):
        reader.read([0])


def test_edges_from_no_node_are_refused(tmp_path: Path) -> None:
    graph = saved(small_graph(), tmp_path)
    file = tmp_path / "graph" / "indices.npy"
    file.chmod(0o644)
    edges = np.load(file, mmap_mode="r+")
    edges[0] = 300
    edges.flush()
    with pytest.raises(ValueError, match=r"graph is damaged \(edges from 0 on come from nodes that it does not have\)"):
        reader_of(graph).read([0])
