"""Shards on disk: all of the graph, each part once, and nothing half-written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, Partition, save_shards
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.graph.shard import Shard
from lightning_gnn_dist.wire.channel import Channel
from tests.graph.parted import in_order_of_parts, small_graph, some_partition


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph = small_graph(edge_arrays=True)
    save_shards(graph, some_partition(graph, 3), tmp_path / "shares")
    return tmp_path / "shares"


def test_shards_together_are_the_graph(folder: Path) -> None:
    graph = small_graph(edge_arrays=True)
    whole = in_order_of_parts(graph, some_partition(graph, 3))
    shards = [Shard.open(folder, index) for index in range(3)]
    assert torch.equal(torch.cat([shard.rows.degrees() for shard in shards]), whole.degrees())
    assert torch.equal(torch.cat([shard.rows.indices for shard in shards]), whole.indices)
    for name, array in whole.node_arrays.items():
        assert torch.equal(torch.cat([shard.rows.node_arrays[name] for shard in shards]), array)
    for name, array in whole.edge_arrays.items():
        assert torch.equal(torch.cat([shard.rows.edge_arrays[name] for shard in shards]), array)
    assert [shard.first_node for shard in shards] == shards[0].bounds.nodes[:-1].tolist()
    assert shards[0].bounds.fingerprint == graph.fingerprint


def test_a_host_needs_its_own_shard_only(folder: Path) -> None:
    shutil.rmtree(folder / "share-00000")
    assert Shard.open(folder, 1).rows.num_nodes > 0
    with pytest.raises(FileNotFoundError, match=r"Shard 0 of 3 is not on this host: copy .*share-00000"):
        Shard.open(folder, 0)
    with pytest.raises(ValueError, match="3 shards, so there is no shard 3"):
        Shard.open(folder, 3)


def test_a_truncated_shard_is_refused(folder: Path) -> None:
    file = folder / "share-00001" / "indices.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"indices.npy cannot be used"):
        Shard.open(folder, 1)


def test_shards_of_two_divisions_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    other = small_graph(200, edge_arrays=True)
    save_shards(other, some_partition(other, 3), tmp_path / "other")
    shutil.rmtree(folder / "share-00001")
    shutil.copytree(tmp_path / "other" / "share-00001", folder / "share-00001")
    with pytest.raises(ValueError, match="they come from two divisions"):
        Shard.open(folder, 1)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_shards"):
        Shard.open(tmp_path, 0)


def test_nothing_is_left_of_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    save, room = Graph.save, iter(range(2))

    def save_while_there_is_room(graph: Graph, path: Path, **options: Any) -> None:
        if next(room, None) is None:
            raise OSError("No space left on device")
        save(graph, path, **options)

    monkeypatch.setattr(Graph, "save", save_while_there_is_room)
    with pytest.raises(OSError, match="No space"):
        save_shards(graph, some_partition(graph, 3), tmp_path / "shares")
    assert not list(tmp_path.iterdir())


def test_what_exists_is_not_overwritten(folder: Path) -> None:
    graph = small_graph()
    with pytest.raises(FileExistsError, match="Choose another path"):
        save_shards(graph, some_partition(graph, 3), folder)


def test_a_partition_of_another_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="assigns 200 nodes, but the graph has 300"):
        save_shards(small_graph(), some_partition(small_graph(200), 3), tmp_path / "shares")


def test_a_rank_needs_the_shard_of_its_place(folder: Path) -> None:
    with pytest.raises(ValueError, match="Rank 0 of 1 needs shard 0 of 1, and has shard 1 of 3"):
        ShardedGraph(Shard.open(folder, 1), Channel(None, 1, 0))


def test_a_shard_without_nodes_is_refused(tmp_path: Path) -> None:
    graph = small_graph()
    empty = Partition(torch.zeros(graph.num_nodes, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="Part 1 of the partition has no nodes"):
        save_shards(graph, empty, tmp_path / "shards")
