"""What follows from the figures of a partition: the cases that were measured, and memory to the byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Graph,
    Isolated,
    MetisPartitioner,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    SuperNodePartitioner,
    communities,
)
from lightning_gnn_dist.graph.graph import bytes_of_part
from lightning_gnn_dist.partition.advice import advise, beyond_chance


def finding(graph: Graph, partitioner: Any, parts: int = 8) -> list[str]:
    return advise(graph, partitioner(graph, parts, 0).report(graph))


@pytest.mark.parametrize(
    ("name", "partitioner", "differ", "lost"),
    [
        ("cora.npz", MetisPartitioner(), True, False),
        ("cora.npz", RandomPartitioner(), False, True),
        ("cora.npz", SuperNodePartitioner(400), False, False),
        ("amazon_computers.npz", MetisPartitioner(), True, False),
        ("amazon_computers.npz", RandomPartitioner(), False, True),
        ("amazon_computers.npz", SuperNodePartitioner(400), False, False),
        ("minesweeper.npz", MetisPartitioner(), False, False),
    ],
)
def test_measured_cases_are_told_apart(
    name: str, partitioner: Any, differ: bool, lost: bool, to_pyg: Callable[..., Data]
) -> None:
    found = finding(Graph.from_pyg(to_pyg(name, split=0)), partitioner)
    assert ("hold different labels" in found[0], "too many to ignore" in found[1]) == (differ, lost)


def test_the_strategy_follows() -> None:
    two_camps = communities(2000, 2, homophily=1.0)
    text = "\n".join(finding(two_camps, MetisPartitioner(), 2))
    assert "The parts hold different labels" in text
    assert "GrappaStrategy()" in text and "LLCGStrategy(clock), which corrects" in text
    sparse = communities(2000, mean_degree=2.0)
    text = "\n".join(finding(sparse, RandomPartitioner(), 4))
    assert "The parts look alike" in text
    assert "correction=Correction(0.5" in text and "SuperNodePartitioner()" in text
    dense = communities(2000, mean_degree=40.0)
    assert "LocalSGDStrategy(EverySteps(16)) is enough" in "\n".join(finding(dense, RandomPartitioner(), 2))
    text = "\n".join(finding(dense, RandomPartitioner(), 8))
    assert "is enough" not in text and "misses 87% of the edges" in text and 'boundary="auto"' in text


def test_the_fan_out_follows_the_degrees() -> None:
    ring = torch.arange(100_000)
    graph = Graph.from_edge_index(torch.stack([ring, (ring + 1) % 100_000]), 100_000)
    halves = Partition((ring >= 50_000).to(torch.int32), 2)
    (sentence,) = (s for s in advise(graph, halves.report(graph)) if "seeds" in s)
    assert "keeps 1.0 neighbours in the mean, of which NeighborSampler([15, 10]) draws 1.0" in sentence
    assert "a batch of 1,024 seeds reaches about 6% of a part." in sentence  # 3 * 1024 of 50,000
    small = communities(500)
    assert "WholePartSampler(2) spares" in "\n".join(finding(small, RandomPartitioner(), 2))


def test_chance_is_not_taken_for_a_difference() -> None:
    graph = communities(4000, train_share=0.02)  # ten training nodes a part
    report = RandomPartitioner()(graph, 8, 0).report(graph)
    excess = beyond_chance(graph, report.label_skew, report.train_nodes, report.nodes)
    assert report.worst_label_skew is not None and report.worst_label_skew > 0.3
    assert excess is not None and abs(excess) < 0.1


def test_what_is_missing_is_said() -> None:
    bare = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    text = "\n".join(finding(bare, RandomPartitioner(), 2))
    assert "Without labels" in text and "There is no train_mask" in text
    graph = communities(2000)
    bare = Graph(graph.indptr, graph.indices, {})
    text = "\n".join(finding(bare, MetisPartitioner(), 2))
    assert "Without labels" in text and "GrappaStrategy() loses nothing where parts differ" in text  # it is not known


def test_training_nodes_in_one_part_are_seen() -> None:
    graph = communities(1000)
    first = graph.split("train")[0]
    assignment = torch.ones(1000, dtype=torch.int32)
    assignment[:first] = 0  # no training node is there
    assert "Part 0 has no training node" in advise(graph, Partition(assignment, 2).report(graph))[-1]
    assignment[: first + 1] = 0
    assert "times the mean" in advise(graph, Partition(assignment, 2).report(graph))[-1]


def test_memory_is_that_of_the_part() -> None:
    graph = communities(1000)
    graph = Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_weight": torch.rand(graph.num_edges)})
    partition = MetisPartitioner()(graph, 3, 0)
    report = partition.report(graph)
    ram = bytes_of_part(graph, report.nodes, report.inside_edges)
    data = PartitionedDataModule(graph, partitioner=partition, boundary=Isolated())
    assert ram.tolist() == [data.part(rank, 3).num_bytes for rank in range(3)]
