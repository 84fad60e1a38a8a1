"""What every partitioner promises, whatever the graph. A new one is enrolled by one line here."""

import pytest
import torch

from lightning_gnn_dist import (
    Graph,
    KaMinParPartitioner,
    MetisPartitioner,
    Partition,
    RandomPartitioner,
    StreamingPartitioner,
    SuperNodePartitioner,
    communities,
)
from lightning_gnn_dist.partition import kaminpar
from lightning_gnn_dist.partition.base import Partitioner
from tests.partition.graphs import lonely_nodes, messy_community, path_graph, random_directed

_OF_KAMINPAR: list[Partitioner] = []
if kaminpar.is_available():
    _OF_KAMINPAR = [KaMinParPartitioner(), KaMinParPartitioner("train", imbalance=0.0), KaMinParPartitioner("edges")]
    _OF_KAMINPAR.append(SuperNodePartitioner(24, KaMinParPartitioner(preset="fast")))
PARTITIONERS: list[Partitioner] = [
    RandomPartitioner(),
    MetisPartitioner(),
    MetisPartitioner(balance="train"),
    MetisPartitioner(imbalance=0.0),
    *_OF_KAMINPAR,
    SuperNodePartitioner(num_supernodes=24),
    StreamingPartitioner("ldg"),
    StreamingPartitioner("fennel"),
    StreamingPartitioner("ldg", slack=1.0, passes=1),
    StreamingPartitioner("fennel", slack=0.0, passes=2, order="random"),
]
SEEDED = [p for p in PARTITIONERS if not isinstance(p, StreamingPartitioner) or p.order == "random"]
GRAPHS = {
    "communities": communities(400, 4, num_features=2, train_share=0.3),
    "directed, self loops, duplicates": random_directed(),
    "communities, self loops, duplicates": messy_community(),
    "path": path_graph(50),
    "directed path": path_graph(50, both_ways=False),
    "isolated nodes": lonely_nodes(),
    "no edges": Graph(torch.zeros(31, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)),
}
any_partitioner = pytest.mark.parametrize("partitioner", PARTITIONERS, ids=repr)
any_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


def same(left: Partition, right: Partition) -> bool:
    return torch.equal(left.assignment, right.assignment)


def with_train_mask(graph: Graph) -> Graph:
    train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
    return Graph(graph.indptr, graph.indices, {"train_mask": train_mask} | graph.node_arrays)


@any_partitioner
@any_graph
@pytest.mark.parametrize("num_parts", [1, 2, 7, 24])
def test_every_node_is_in_one_part_and_no_part_is_empty(partitioner: Partitioner, graph: Graph, num_parts: int) -> None:
    partition = partitioner(with_train_mask(graph), num_parts, seed=0)
    assert partition.num_parts == num_parts
    assert partition.assignment.shape == (graph.num_nodes,)
    assert partition.counts().sum() == graph.num_nodes
    assert partition.counts().min() >= 1


@any_partitioner
@any_graph
def test_the_same_seed_gives_the_same_parts_whatever_happened_before(partitioner: Partitioner, graph: Graph) -> None:
    graph = with_train_mask(graph)
    first = partitioner(graph, 5, seed=3)
    torch.manual_seed(1)
    partitioner(graph, 4, seed=9)
    assert same(first, partitioner(graph, 5, seed=3))


@pytest.mark.parametrize("partitioner", SEEDED, ids=repr)
def test_another_seed_gives_other_parts(partitioner: Partitioner) -> None:
    graph = GRAPHS["communities"]
    assert not same(partitioner(graph, 5, seed=0), partitioner(graph, 5, seed=1))


@pytest.mark.parametrize("partitioner", [p for p in PARTITIONERS if not isinstance(p, SuperNodePartitioner)], ids=repr)
@pytest.mark.parametrize("num_nodes", [1, 2, 5, 24])
def test_as_many_parts_as_nodes(partitioner: Partitioner, num_nodes: int) -> None:
    for graph in (path_graph(num_nodes), path_graph(num_nodes, both_ways=False)):
        partition = partitioner(graph, num_nodes, seed=0)
        assert partition.assignment.sort().values.tolist() == list(range(num_nodes))


@any_partitioner
def test_more_parts_than_nodes_are_refused(partitioner: Partitioner) -> None:
    with pytest.raises(ValueError, match=r"num_parts \(8\) must not exceed the graph's nodes \(5\)"):
        partitioner(path_graph(5), 8, seed=0)


@any_partitioner
def test_a_graph_on_disk_is_cut_like_the_same_graph_in_ram(
    partitioner: Partitioner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph = GRAPHS["communities"]
    folder = tmp_path_factory.mktemp("graph") / "saved"
    graph.save(folder)
    assert same(partitioner(graph, 6, seed=0), partitioner(Graph.open(folder), 6, seed=0))


@any_partitioner
def test_the_graph_is_left_as_it_was(partitioner: Partitioner) -> None:
    graph = messy_community()
    before = graph.indptr.clone(), graph.indices.clone()
    partitioner(graph, 6, seed=0)
    assert torch.equal(before[0], graph.indptr)
    assert torch.equal(before[1], graph.indices)


@any_partitioner
def test_the_order_of_a_row_does_not_matter_to_what_is_promised(partitioner: Partitioner) -> None:
    graph = GRAPHS["communities"].induced(torch.arange(400).flip(0))  # local ids run backwards in every row
    partition = partitioner(graph, 6, seed=0)
    assert partition.counts().min() >= 1
    assert partition.counts().sum() == 400
