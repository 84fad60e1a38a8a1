"""A partition checks itself, and says what it was given."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.partition_report import MAX_ROWS
from tests.partition.graphs import label_skew, lonely_nodes, messy_community, path_graph, random_directed


def assignment(*parts: int) -> Tensor:
    return torch.tensor(parts, dtype=torch.int32)


def test_nodes_and_counts() -> None:
    partition = lgd.Partition(assignment(2, 0, 2, 0, 2), num_parts=4)
    assert partition.nodes(2).tolist() == [0, 2, 4]
    assert partition.nodes(1).tolist() == []
    assert partition.counts().tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize(
    ("parts", "num_parts", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 1, r"torch\.int64 of shape \(3,\).*to\(torch\.int32\)"),
        (torch.zeros(3), 1, "torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int32), 1, r"shape \(3, 1\)"),
        (assignment(0, 1, 2), 2, r"names part 2, but there are 2 parts.*\[0, 2\)"),
        (assignment(0, -1), 2, "names part -1"),
    ],
)
def test_bad_partitions_are_refused(parts: Tensor, num_parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.Partition(parts, num_parts)


def test_a_report_is_on_the_graph_that_was_partitioned() -> None:
    with pytest.raises(ValueError, match="assigns 3 nodes, but the graph has 4"):
        lgd.Partition(assignment(0, 0, 1), 2).report(path_graph(4))


def test_nothing_changes_a_partition_that_was_made() -> None:
    assignment = torch.tensor([0, 1, 1], dtype=torch.int32)
    partition = lgd.Partition(assignment, 2)
    assignment[0] = 9
    assert partition.counts().tolist() == [1, 2]
    partition.assignment[0] = 9  # nobody does; loops must not read beyond an array all the same
    with pytest.raises(ValueError, match="assignment names part 9"):
        partition.counts()


# What every partitioner promises, whatever the graph. A new one is enrolled by one line here.


PARTITIONERS: list[Partitioner] = [
    lgd.RandomPartitioner(),
    lgd.MetisPartitioner(),
    lgd.MetisPartitioner(balance="train"),
    lgd.MetisPartitioner(imbalance=0.0),
    lgd.SuperNodePartitioner(num_supernodes=24),
    lgd.StreamingPartitioner(),
    lgd.StreamingPartitioner(slack=1.0, passes=1),
    lgd.StreamingPartitioner(slack=0.0, passes=2, order="random"),
]
SEEDED = [p for p in PARTITIONERS if not isinstance(p, lgd.StreamingPartitioner) or p.order == "random"]
GRAPHS = {
    "communities": lgd.communities(400, 4, num_features=2, train_share=0.3),
    "directed, self loops, duplicates": random_directed(),
    "communities, self loops, duplicates": messy_community(),
    "path": path_graph(50),
    "directed path": path_graph(50, both_ways=False),
    "isolated nodes": lonely_nodes(),
    "no edges": lgd.Graph(torch.zeros(31, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)),
}
any_partitioner = pytest.mark.parametrize("partitioner", PARTITIONERS, ids=repr)


def same(left: lgd.Partition, right: lgd.Partition) -> bool:
    return torch.equal(left.assignment, right.assignment)


def with_train_mask(graph: lgd.Graph) -> lgd.Graph:
    train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
    return lgd.Graph(graph.indptr, graph.indices, {"train_mask": train_mask} | graph.node_arrays)


@any_partitioner
def test_every_node_is_in_one_part_and_no_part_is_empty(partitioner: Partitioner) -> None:
    for (name, graph), num_parts in product(GRAPHS.items(), [1, 2, 7, 24]):
        partition = partitioner(with_train_mask(graph), num_parts, seed=0)
        assert partition.num_parts == num_parts
        assert partition.assignment.shape == (graph.num_nodes,)
        assert partition.counts().sum() == graph.num_nodes
        assert partition.counts().min() >= 1, (name, num_parts)


@any_partitioner
def test_the_same_seed_gives_the_same_parts_whatever_happened_before(partitioner: Partitioner) -> None:
    for name, graph in GRAPHS.items():
        graph = with_train_mask(graph)
        first = partitioner(graph, 5, seed=3)
        torch.manual_seed(1)
        partitioner(graph, 4, seed=9)
        assert same(first, partitioner(graph, 5, seed=3)), name


@pytest.mark.parametrize("partitioner", SEEDED, ids=repr)
def test_another_seed_gives_other_parts(partitioner: Partitioner) -> None:
    graph = GRAPHS["communities"]
    assert not same(partitioner(graph, 5, seed=0), partitioner(graph, 5, seed=1))


@pytest.mark.parametrize(
    "partitioner", [p for p in PARTITIONERS if not isinstance(p, lgd.SuperNodePartitioner)], ids=repr
)
def test_as_many_parts_as_nodes_and_no_more(partitioner: Partitioner) -> None:
    for num_nodes, both_ways in product([1, 2, 5, 24], [True, False]):
        partition = partitioner(path_graph(num_nodes, both_ways=both_ways), num_nodes, seed=0)
        assert partition.assignment.sort().values.tolist() == list(range(num_nodes))
    with pytest.raises(ValueError, match=r"num_parts \(8\) must not exceed the graph's nodes \(5\)"):
        partitioner(path_graph(5), 8, seed=0)


@any_partitioner
def test_a_graph_on_disk_is_cut_like_the_same_graph_in_ram(partitioner, tmp_path_factory) -> None:
    graph = GRAPHS["communities"]
    folder = tmp_path_factory.mktemp("graph") / "saved"
    graph.save(folder)
    assert same(partitioner(graph, 6, seed=0), partitioner(lgd.Graph.open(folder), 6, seed=0))


@any_partitioner
def test_the_graph_is_left_as_it_was_and_rows_may_have_any_order(partitioner: Partitioner) -> None:
    backwards = GRAPHS["communities"].induced(torch.arange(400).flip(0))  # local ids run backwards in every row
    for graph in (messy_community(), backwards):
        before = graph.indptr.clone(), graph.indices.clone()
        partition = partitioner(graph, 6, seed=0)
        assert torch.equal(before[0], graph.indptr) and torch.equal(before[1], graph.indices)
        assert partition.counts().min() >= 1 and partition.counts().sum() == graph.num_nodes


# Partitions of a graph with types: all nodes in one id space, every part with its share of each type's seeds.


@pytest.fixture(scope="module")
def data() -> HeteroData:
    """Papers and authors to train on, unevenly over the fields; of venues three, fewer than parts."""
    data = lgd.citations(1200, 4).to_pyg()
    assert isinstance(data, HeteroData)
    data["author"].train_mask = data["author"].x[:, 0] > 1
    data["venue"].train_mask = torch.arange(12) < 3
    return data


@pytest.mark.parametrize(
    "partitioner",
    [lgd.RandomPartitioner(), lgd.MetisPartitioner(), lgd.StreamingPartitioner(), lgd.SuperNodePartitioner(20)],
    ids=str,
)
def test_types_change_no_partition(partitioner: Partitioner, data: HeteroData, tmp_path: Path) -> None:
    graph = lgd.Graph.from_pyg(data)
    at = torch.argsort(torch.arange(graph.num_nodes).repeat_interleave(graph.degrees()) * 2**20 + graph.indices)
    plain = lgd.Graph(graph.indptr, graph.indices[at])  # rows in order of senders alone
    found = cached_partition(graph, partitioner, 4, 0, tmp_path)
    assert torch.equal(found.assignment, partitioner(plain, 4, 0).assignment)
    assert torch.equal(cached_partition(graph, partitioner, 4, 0, tmp_path).assignment, found.assignment)


def test_every_part_has_its_share_of_each_types_training_nodes(data: HeteroData) -> None:
    graph = lgd.Graph.from_pyg(data)
    report = lgd.MetisPartitioner(balance="train")(graph, 4, seed=0).report(graph)
    assert report.train_nodes is not None
    assert list(report.train_of_types) == ["paper", "author", "venue"]
    for kind, counts in report.train_of_types.items():
        total = int(data[kind].train_mask.sum())
        assert int(counts.sum()) == total and counts.max() <= max(-(-total // 4), int(1.03 * total / 4))
    assert torch.equal(sum(report.train_of_types.values()), report.train_nodes)  # type: ignore[arg-type]
    assert report.train_of_types["paper"].min() > 0 and report.nodes.max() <= 1.03 * graph.num_nodes / 4
    alone = lgd.MetisPartitioner()(graph, 4, seed=0).report(graph)
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
    graph = lgd.Graph.from_pyg(data)
    report = lgd.MetisPartitioner(balance="train")(graph, 5, seed=0).report(graph)
    assert all(2 <= int(counts.min()) <= int(counts.max()) <= 3 for counts in list(report.train_of_types.values())[1:])
    assert report.train_of_types["t0"].max() == 1


# The numbers of a report, against counting edge by edge.


@pytest.mark.parametrize("num_parts", [1, 3, 70, 120])
@pytest.mark.parametrize("on_disk", [False, True])
def test_every_number(num_parts: int, on_disk: bool, tmp_path: Path) -> None:
    graph = random_directed()
    if on_disk:
        graph.save(tmp_path / "graph")
        graph = lgd.Graph.open(tmp_path / "graph")
    partition = lgd.RandomPartitioner()(graph, num_parts, seed=0)
    report = partition.report(graph)
    part = partition.assignment.tolist()
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees()).tolist()
    edges = list(zip(graph.indices.tolist(), receivers, strict=True))
    labelled = graph.node_arrays["train_mask"]
    label = graph.node_arrays["y"][labelled]

    for p in range(num_parts):
        members = {node for node in range(graph.num_nodes) if part[node] == p}
        halo = {u for u, v in edges if v in members and u not in members}
        received = {v for u, v in edges if v in members and u != v}
        received_inside = {v for u, v in edges if v in members and u in members and u != v}
        assert report.nodes[p] == len(members)
        assert report.train_nodes[p] == sum(bool(labelled[node]) for node in members)
        assert report.inside_edges[p] == sum(u in members and v in members for u, v in edges)
        assert report.halo_nodes[p] == len(halo)
        assert report.isolated_nodes[p] == len(received - received_inside)
        inside = partition.assignment[labelled] == p
        if bool(inside.any()):
            assert float(report.label_skew[p]) == pytest.approx(label_skew(label, inside))
        else:
            assert math.isnan(report.label_skew[p])
    cut = sum(part[u] != part[v] for u, v in edges)
    assert report.cut_edges == cut
    assert report.cut_ratio == pytest.approx(cut / len(edges))


def test_labels_count_on_all_labelled_nodes_without_a_train_mask() -> None:
    y = torch.tensor([0, 0, 1, -1, 1, 1])
    graph = lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 6, {"y": y})
    report = lgd.Partition(torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32), 2).report(graph)
    assert report.train_nodes is None
    assert report.label_skew.tolist() == pytest.approx([4 / 15, 2 / 5])
    assert report.worst_label_skew == pytest.approx(2 / 5)


def test_labels_of_types_count_one_by_one() -> None:
    """By hand: classes of one type are not those of another, and a chosen type counts alone."""
    data = HeteroData()
    data["a"].y, data["a"].train_mask = torch.tensor([0, 1, 1, -1]), torch.tensor([True, True, True, False])
    data["b"].y, data["b"].train_mask = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
    data["c"].num_nodes = 2
    data["a", "to", "b"].edge_index = torch.tensor([[0, 3], [1, 2]])
    graph = lgd.Graph.from_pyg(data)
    halves = lgd.Partition(torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.int32), 2)
    skew = halves.report(graph).label_skew
    assert skew.tolist() == pytest.approx(
        [(2 / 15 + 1 / 15 + 2 / 15 + 1 / 5) / 2, (1 / 5 + 1 / 10 + 1 / 5 + 3 / 10) / 2]
    )
    of_b = halves.report(graph.with_seeds("b")).label_skew
    assert of_b is not None and of_b.tolist() == pytest.approx([1 / 2, 1 / 2])


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"y": torch.rand(6)},
        {"y": torch.zeros(6, 2, dtype=torch.int64)},
        {"y": torch.full((6,), -1)},
        {"y": torch.zeros(6, dtype=torch.int64), "train_mask": torch.zeros(6, dtype=torch.bool)},
    ],
    ids=["no labels", "regression", "many tasks", "all unlabelled", "nobody trains"],
)
def test_without_labels_there_is_no_skew(arrays: dict[str, torch.Tensor]) -> None:
    graph = lgd.Graph.from_edge_index(torch.tensor([[0, 3], [1, 4]]), 6, arrays)
    report = lgd.Partition(torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32), 2).report(graph)
    assert report.label_skew is None
    assert report.worst_label_skew is None
    assert str(report).endswith("worst label skew -")


def test_a_graph_without_edges() -> None:
    graph = lgd.Graph(torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    report = lgd.Partition(torch.tensor([0, 1, 0], dtype=torch.int32), 2).report(graph)
    assert (report.cut_edges, report.cut_ratio) == (0, 0.0)
    assert report.isolated_nodes.tolist() == [0, 0]


def test_the_table() -> None:
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3], [1, 0, 2, 1, 3, 2, 3]])
    arrays = {"y": torch.tensor([0, 0, 1, 1]), "train_mask": torch.tensor([True, True, True, False])}
    graph = lgd.Graph.from_edge_index(edges, 4, arrays)
    report = lgd.Partition(torch.tensor([0, 0, 1, 2], dtype=torch.int32), 3).report(graph)
    assert str(report).splitlines() == [
        "part  nodes  training nodes  edges inside  halo nodes  isolated nodes  label skew",
        "   0      2               2             2           1               0       0.333",
        "   1      1               1             0           2               1       0.667",
        "   2      1               0             1           1               1           -",
        "3 parts: 4 of 7 edges cut (57.1%), 2 nodes left without neighbours, worst label skew 0.667",
    ]


def test_a_long_table_is_cut_short() -> None:
    graph = path_graph(MAX_ROWS + 1234)
    partition = lgd.RandomPartitioner()(graph, graph.num_nodes, seed=0)
    lines = str(partition.report(graph)).splitlines()
    assert len(lines) == MAX_ROWS + 3
    assert lines[-2] == "... and 1,234 more parts"
