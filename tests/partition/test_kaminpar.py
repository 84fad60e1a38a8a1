"""KaMinPar: what its file holds, what it evens out, and what is said where it is not installed or has no room."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import (
    Graph,
    KaMinParPartitioner,
    PartitionedDataModule,
    RandomPartitioner,
    StreamingPartitioner,
    communities,
)
from lightning_gnn_dist.partition import default, kaminpar, metis
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.kaminpar import _file
from lightning_gnn_dist.partition.multilevel import undirected
from tests.partition.graphs import random_directed

needs_it = pytest.mark.skipif(not kaminpar.is_available(), reason="KaMinPar is not installed")


@pytest.mark.parametrize("with_weights", [False, True])
def test_the_file_holds_every_edge_both_ways_once(with_weights: bool, tmp_path: Path) -> None:
    graph = random_directed()
    file = tmp_path / "graph"
    undirected(graph, lambda start: _file(file, start, with_weights=with_weights))
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    pairs = {frozenset(edge) for edge in zip(graph.indices.tolist(), receivers.tolist(), strict=True)}
    around: list[set[int]] = [set() for _ in range(graph.num_nodes)]
    for pair in pairs:
        if len(pair) == 2:
            first, second = pair
            around[first].add(second), around[second].add(first)
    content = file.read_bytes()
    version, num_nodes, num_edges = np.frombuffer(content, np.uint64, 3).tolist()
    starts = np.frombuffer(content, np.uint64, num_nodes + 1, 24).tolist()
    assert (version, num_nodes, num_edges) == (9 if with_weights else 11, graph.num_nodes, sum(map(len, around)))
    for node, neighbors in enumerate(around):
        count = (starts[node + 1] - starts[node]) // 4
        assert set(np.frombuffer(content, np.uint32, count, starts[node]).tolist()) == neighbors
        assert count == len(neighbors)
    rest = np.frombuffer(content[starts[-1] :], np.int64).tolist()
    assert rest == ([1 + len(neighbors) for neighbors in around] if with_weights else [])


@needs_it
def test_it_cuts_fewer_edges_and_evens_out_what_it_is_told() -> None:
    graph = communities(3000, 4, num_features=2, homophily=0.9)
    cut = {name: KaMinParPartitioner(balance=name)(graph, 6, 0) for name in ("nodes", "edges")}
    at_random, streamed = (
        each(graph, 6, 0).report(graph).cut_ratio for each in (RandomPartitioner(), StreamingPartitioner())
    )
    assert all(each.report(graph).cut_ratio < min(0.6 * at_random, streamed) for each in cut.values())
    assert cut["nodes"].counts().max() <= 1.03 * 500
    edges = {name: torch.zeros(6).index_add_(0, each.assignment, graph.degrees() + 1.0) for name, each in cut.items()}
    assert edges["edges"].max() <= 1.03 * edges["edges"].mean() + graph.degrees().max()
    assert edges["edges"].max() - edges["edges"].min() < edges["nodes"].max() - edges["nodes"].min()


def test_without_it_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kaminpar, "kaminpar", None)
    with pytest.raises(ValueError, match=r'pip install "lightning-gnn-dist\[kaminpar\]"; or take StreamingPartitioner'):
        KaMinParPartitioner()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="a system without posix_fallocate")
def test_a_full_disk_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(kaminpar, "kaminpar", kaminpar.kaminpar or object())
    with pytest.raises(OSError, match="has no room for the file that KaMinPar reads, 4 bytes for each of"):
        KaMinParPartitioner()(random_directed(), 2, 0)


GB = 10**9


@pytest.mark.parametrize(
    ("num_edges", "memory", "installed", "expected"),
    [
        (10**6, 8 * GB, True, "Metis"),
        (30 * 10**6, 80 * GB, True, "KaMinPar"),  # METIS fits, and takes long
        (30 * 10**6, 80 * GB, False, "Metis"),
        (10**7, 2 * GB, True, "KaMinPar"),
        (10**7, 2 * GB, False, "Streaming"),
        (10**8, 2 * GB, True, "Streaming"),
    ],
)
def test_size_and_memory_decide(
    num_edges: int, memory: int, installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(metis, "pymetis", object())
    monkeypatch.setattr(kaminpar, "kaminpar", object() if installed else None)
    default._tell.cache_clear()
    assert type(default_partitioner(num_edges, memory)).__name__ == f"{expected}Partitioner"
    alike: Any = default_partitioner(num_edges, memory, look_alike=True)
    assert type(alike).__name__ == "SuperNodePartitioner"
    assert type(alike.clusters).__name__ == ("NoneType" if expected == "Metis" else f"{expected}Partitioner")
    assert len(logged) == (expected != "Metis")
    assert all("METIS would take about" in text and f"for {num_edges:,} edges" in text for text in logged)
    assert all(("gnn-dist[kaminpar]" in text) == (expected == "Streaming" and not installed) for text in logged)


def test_auto_is_what_no_name_is() -> None:
    graph = communities(200, 2, num_features=2)
    assert PartitionedDataModule(graph, partitioner="auto").partitioner == PartitionedDataModule(graph).partitioner


def test_a_saved_graph_is_cut_beside_it_and_nothing_stays(tmp_path: Path) -> None:
    communities(200, 2, num_features=2).save(tmp_path / "graph")
    if kaminpar.is_available():
        KaMinParPartitioner()(Graph.open(tmp_path / "graph"), 3, 0)
    assert [each.name for each in tmp_path.iterdir()] == ["graph"]
