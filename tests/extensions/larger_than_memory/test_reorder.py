"""A graph in chunk order is the graph with other numbers, whole or not there, and says where its chunks begin."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, Partition
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.larger_than_memory import chunks as module
from lightning_gnn_dist.extensions.larger_than_memory.chunks import FILE, ChunkReader, Chunks
from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, row_slices
from lightning_gnn_dist.graph.storage import npy
from tests.graph.equal import check_equal
from tests.graph.parted import as_shards_number_it, small_graph, some_partition, typed_graph_of_widths, uneven_partition


def in_halves() -> Graph:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].bfloat16()
    return graph


GRAPHS: dict[str, Callable[[], Graph]] = {
    "untyped": lambda: small_graph(edge_arrays=True),
    "typed": typed_graph_of_widths,
    "in halves": in_halves,
}


def cut(graph: Graph) -> Partition:
    return some_partition(graph, 7) if graph.num_nodes > 100 else uneven_partition(graph, 5)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("memory_bytes", [1, 40_000, 1 << 30])
def test_the_graph_is_the_same_in_the_order_of_chunks(kind: str, memory_bytes: int, tmp_path: Path) -> None:
    graph = GRAPHS[kind]()
    reorder_graph(graph, cut(graph), tmp_path / "graph", memory_bytes=memory_bytes)
    check_equal(Graph.open(tmp_path / "graph"), as_shards_number_it(graph, cut(graph)))
    main(["inspect", "--check", str(tmp_path / "graph")])  # checksums are those of the files


def test_ids_of_the_first_order_stay_visible(tmp_path: Path) -> None:
    graph = typed_graph_of_widths()
    reorder_graph(graph, uneven_partition(graph, 3), tmp_path / "once")
    once = Graph.open(tmp_path / "once")
    reorder_graph(once, uneven_partition(once, 4), tmp_path / "twice")
    twice = Graph.open(tmp_path / "twice")
    for kind, arrays in twice.types.node_arrays.items():
        for name, array in graph.types.node_arrays[kind].items():
            assert array[arrays["n_id"]].equal(arrays[name])


def test_nothing_is_left_of_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, append, room = small_graph(), npy.append, iter(range(3))

    def append_while_there_is_room(file: Path, array: Any) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, array)

    monkeypatch.setattr("lightning_gnn_dist.prepare.arrays.append", append_while_there_is_room)
    with pytest.raises(OSError, match=r"the disk of .*graph is full .*: make room, and repeat"):
        reorder_graph(graph, some_partition(graph, 4), tmp_path / "graph")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_put_in_order_is_refused(tmp_path: Path) -> None:
    graph = small_graph()
    with pytest.raises(ValueError, match="assigns 299 nodes, but the graph has 300"):
        reorder_graph(graph, some_partition(small_graph(299), 4), tmp_path / "graph")
    with pytest.raises(ValueError, match="Chunk 1 of the partition has no nodes"):
        reorder_graph(graph, Partition(torch.zeros(300).int(), 2), tmp_path / "graph")
    reorder_graph(graph, some_partition(graph, 4), tmp_path / "graph")
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        reorder_graph(graph, some_partition(graph, 4), tmp_path / "graph")
    reorder_graph(graph, some_partition(graph, 5), tmp_path / "graph", overwrite=True)
    chunks = Chunks.of(Graph.open(tmp_path / "graph"))
    assert chunks is not None and chunks.num_chunks == 5


@pytest.mark.parametrize("change", [lambda about: about["nodes"][0].pop(), lambda about: about["edges"].append([0, 1])])
def test_a_damaged_list_of_chunks_is_refused(change: Any, tmp_path: Path) -> None:
    graph = small_graph()
    reorder_graph(graph, some_partition(graph, 4), tmp_path / "graph")
    file = tmp_path / "graph" / FILE
    file.chmod(0o644)
    change(about := json.loads(file.read_text()))
    file.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"chunks.json is damaged .* reorder it again"):
        Chunks.of(Graph.open(tmp_path / "graph"))


def test_a_graph_in_another_order_has_no_chunks(tmp_path: Path) -> None:
    small_graph().save(tmp_path / "graph")
    assert Chunks.of(Graph.open(tmp_path / "graph")) is None and Chunks.of(small_graph()) is None


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_graph().save(tmp_path / "graph")
    order = ["reorder", str(tmp_path / "graph"), str(tmp_path / "ordered"), "--chunks", "8"]
    main([*order, "--partitioner", "random"])
    assert "8 chunks of 37 to 38 nodes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"reorder: .*ordered exists already: .* add --overwrite"):
        main(order)
    with pytest.raises(SystemExit, match="is not a saved graph"):
        main(["reorder", str(tmp_path), str(tmp_path / "b")])


# Chunks that are read from files are the graph among their nodes, and files that changed are refused.


def saved(graph: Graph, folder: Path) -> Graph:
    reorder_graph(graph, cut(graph), folder / "graph")
    return Graph.open(folder / "graph")


def reader_of(graph: Graph) -> ChunkReader:
    chunks = Chunks.of(graph)
    assert chunks is not None
    return ChunkReader(graph, chunks)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("edges_per_piece", [1, 50, EDGES_PER_PIECE])
def test_chunks_are_the_graph_among_their_nodes(
    kind: str, edges_per_piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_gnn_dist.graph.rows.EDGES_PER_PIECE", edges_per_piece)
    monkeypatch.setattr(module, "row_slices", row_slices)
    graph = saved(GRAPHS[kind](), tmp_path)
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


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    graph = saved(small_graph(), tmp_path)
    file = tmp_path / "graph" / "nodes" / "x.npy"
    file.chmod(0o644)
    reader = reader_of(graph)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"x.npy was changed or replaced while the graph was trained on"):
        reader.read([6])
    with pytest.raises(ValueError, match=r"x.npy is truncated: it has .* bytes, and its header promises"):
        reader_of(graph)


def test_a_file_that_gets_shorter_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, preadv = reader_of(saved(small_graph(), tmp_path)), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, out, at: 0 if at > 5000 else preadv(file, out, at))
    with pytest.raises(ValueError, match="became shorter while it was read"):
        reader.read([6])


def test_edges_from_no_node_are_refused(tmp_path: Path) -> None:
    graph = saved(small_graph(), tmp_path)
    file = tmp_path / "graph" / "indices.npy"
    file.chmod(0o644)
    edges = np.load(file, mmap_mode="r+")
    edges[0] = 300
    edges.flush()
    with pytest.raises(ValueError, match=r"graph is damaged \(edges from 0 on come from nodes that it does not have\)"):
        reader_of(graph).read([0])
