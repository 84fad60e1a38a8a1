"""Partitions of a graph with types: all nodes in one id space, every part with its share of each type's seeds."""

from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import (
    Graph,
    MetisPartitioner,
    RandomPartitioner,
    StreamingPartitioner,
    SuperNodePartitioner,
    citations,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition


@pytest.fixture(scope="module")
def data() -> HeteroData:
    """Papers and authors to train on, unevenly over the fields; of venues three, fewer than parts."""
    data = citations(1200, 4).to_pyg()
    assert isinstance(data, HeteroData)
    data["author"].train_mask = data["author"].x[:, 0] > 1
    data["venue"].train_mask = torch.arange(12) < 3
    return data


@pytest.mark.parametrize(
    "partitioner", [RandomPartitioner(), MetisPartitioner(), StreamingPartitioner(), SuperNodePartitioner(20)], ids=str
)
def test_types_change_no_partition(partitioner: Partitioner, data: HeteroData, tmp_path: Path) -> None:
    graph = Graph.from_pyg(data)
    at = torch.argsort(torch.arange(graph.num_nodes).repeat_interleave(graph.degrees()) * 2**20 + graph.indices)
    plain = Graph(graph.indptr, graph.indices[at])  # rows in order of senders alone
    found = cached_partition(graph, partitioner, 4, 0, tmp_path)
    assert torch.equal(found.assignment, partitioner(plain, 4, 0).assignment)
    assert torch.equal(cached_partition(graph, partitioner, 4, 0, tmp_path).assignment, found.assignment)


def test_every_part_has_its_share_of_each_types_training_nodes(data: HeteroData) -> None:
    graph = Graph.from_pyg(data)
    report = MetisPartitioner(balance="train")(graph, 4, seed=0).report(graph)
    assert report.train_nodes is not None
    assert list(report.train_of_types) == ["paper", "author", "venue"]
    for kind, counts in report.train_of_types.items():
        total = int(data[kind].train_mask.sum())
        assert int(counts.sum()) == total and counts.max() <= max(-(-total // 4), int(1.03 * total / 4))
    assert torch.equal(sum(report.train_of_types.values()), report.train_nodes)  # type: ignore[arg-type]
    assert report.train_of_types["paper"].min() > 0 and report.nodes.max() <= 1.03 * graph.num_nodes / 4
    alone = MetisPartitioner()(graph, 4, seed=0).report(graph)
    assert alone.train_of_types["author"].max() > report.train_of_types["author"].max()
    assert "of author" in str(report)


def test_few_training_nodes_of_many_types_reach_every_part() -> None:
    data = HeteroData()
    for number in range(6):  # 11 nodes each, all to train on: five parts get two of each type, or three
        data[f"t{number}"].train_mask = torch.ones(11, dtype=torch.bool)
    data["t0"].train_mask[:] = False
    data["t0"].train_mask[:2] = True
    for number in range(6):
        data[f"t{number}", "to", "t0"].edge_index = torch.arange(11).repeat(2, 1)
    graph = Graph.from_pyg(data)
    report = MetisPartitioner(balance="train")(graph, 5, seed=0).report(graph)
    assert all(2 <= int(counts.min()) <= int(counts.max()) <= 3 for counts in list(report.train_of_types.values())[1:])
    assert report.train_of_types["t0"].max() == 1


def test_many_types_of_training_nodes_may_fill_a_part_beyond_its_share() -> None:
    data, generator = HeteroData(), torch.Generator().manual_seed(0)
    for number in range(6):
        data[f"t{number}"].train_mask = torch.ones(4, dtype=torch.bool)
        edge_index = torch.randint(4, (2, 6), generator=generator)
        data[f"t{number}", "to", f"t{(number + 1) % 6}"].edge_index = edge_index
    graph = Graph.from_pyg(data)
    report = MetisPartitioner(balance="train", imbalance=0.0)(graph, 3, seed=0).report(graph)
    assert all(counts.max() <= 2 for counts in report.train_of_types.values())
    assert report.nodes.max() > 24 // 3  # where all nodes stay where they are, no node can make room


def test_each_part_has_a_training_node_where_no_type_has_enough() -> None:
    data = HeteroData()
    for kind in "abc":
        data[kind].train_mask = torch.arange(8) < 2
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 0]])
    graph = Graph.from_pyg(data)
    report = MetisPartitioner(balance="train")(graph, 6, seed=0).report(graph)
    assert report.train_nodes is not None and report.train_nodes.tolist() == [1] * 6


def test_inspect_tells_partitions_of_types(
    data: HeteroData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Graph.from_pyg(data).save(tmp_path / "graph")
    main(["inspect", str(tmp_path / "graph"), "--parts", "3", "--balance", "train"])
    said = capsys.readouterr().out
    assert "of paper  of author  of venue" in said and "3 parts: " in said
