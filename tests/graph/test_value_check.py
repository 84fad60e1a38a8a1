"""Values that would poison a training are told of at its start, by the node's own number."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import (
    Graph,
    Isolated,
    LinkDataModule,
    Loading,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    communities,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.graph.value_check import ValueCheck
from tests.placing import batches_of

NAN, INF = float("nan"), float("inf")


def spoilt(name: str, value: float, *, marked: bool = True, **arrays: Any) -> tuple[Graph, int]:
    """A graph with one bad number, at a node that is marked for training, or is not."""
    graph = communities(60, 4, num_features=3, seed=1)
    graph.node_arrays.update(arrays)
    graph.edge_arrays["edge_weight"] = torch.ones(graph.num_edges)
    node = int((graph.node_arrays["train_mask"] == marked).nonzero()[5])
    if name == "edge_weight":
        graph.edge_arrays[name][int(graph.indptr[node])] = value
    else:
        graph.node_arrays[name][node] = value
    return graph, node


WORDS = [
    ("x", NAN, {}, "x of node {node} is NaN"),
    ("x", INF, {}, "x of node {node} is NaN"),
    ("x", -INF, {"x": torch.zeros(60, 3, dtype=torch.float16)}, "x of node {node} is NaN"),
    ("x", NAN, {"x": torch.zeros(60, 3, dtype=torch.complex64)}, "x of node {node} is NaN"),
    ("x_scale", NAN, {"x_scale": torch.ones(60)}, "x_scale of node {node} is NaN"),
    ("edge_weight", NAN, {}, r"edge_weight of the edge from \d+ to {node} is NaN"),
    ("y", -1, {}, "y of node {node} is -1, and classes are counted from 0 .* train_mask"),
    ("y", NAN, {"y": torch.zeros(60)}, "y of node {node} is nan, which is NaN"),
]


@pytest.mark.parametrize(("name", "value", "arrays", "words"), WORDS)
def test_a_bad_value_is_told_of_with_its_node(name: str, value: float, arrays: dict[str, Any], words: str) -> None:
    graph, node = spoilt(name, value, **arrays)
    with pytest.raises(ValueError, match=words.format(node=node)):
        ValueCheck(is_on=True).of_training(graph, graph.split("train"))
    ValueCheck(is_on=False).of_training(graph, graph.split("train"))


FINE: list[tuple[str, float, dict[str, Any]]] = [
    ("y", -1, {"marked": False}),
    ("y", NAN, {"marked": False, "y": torch.zeros(60)}),
    ("y", -100, {}),
    ("y", -1, {"y": torch.zeros(60, 2, dtype=torch.int64)}),
    ("x", 6e4, {"x": torch.full((60, 3), 6e4, dtype=torch.float16)}),
    ("x", 3e38, {"x": torch.full((60, 3), 3e38)}),
    ("time", NAN, {"time": torch.zeros(60)}),
]


@pytest.mark.parametrize(("name", "value", "arrays"), FINE)
def test_what_may_be_meant_is_left_alone(name: str, value: float, arrays: dict[str, Any]) -> None:
    graph, _ = spoilt(name, value, **arrays)
    ValueCheck(is_on=True).of_training(graph, graph.split("train"))


def of(graph: Graph, **options: Any) -> PartitionedDataModule:
    sides = Partition((torch.arange(60) >= 30).int(), 2)
    return PartitionedDataModule(graph, partitioner=sides, sampler=NeighborSampler([2]), boundary=Isolated(), **options)


def test_a_part_names_nodes_as_the_graph_does() -> None:
    graph, node = spoilt("x", NAN)
    owner = int(node >= 30)
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        batches_of(of(graph), of(graph).part(owner, 2), 1, 0, owner, 2)
    other = 1 - owner
    batches_of(of(graph), of(graph).part(other, 2), 1, 0, other, 2)
    batches_of(of(graph, loading=Loading(check_values=False)), of(graph).part(owner, 2), 1, 0, owner, 2)


def test_links_are_learned_from_no_such_values() -> None:
    graph, node = spoilt("x", NAN)
    split = split_edges(graph, 0.1, 0.1, negatives=2)
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        next(iter(LinkDataModule(split, sampler=NeighborSampler([2])).train_dataloader()))
    unchecked = LinkDataModule(split, sampler=NeighborSampler([2]), loading=Loading(check_values=False))
    next(iter(unchecked.train_dataloader()))


def test_a_shard_names_nodes_as_the_graph_did(tmp_path: Path) -> None:
    graph, node = spoilt("y", -1)
    save_shards(graph, Partition(torch.zeros(60, dtype=torch.int32), 1), tmp_path / "shards")
    for is_on in (True, False):
        data = PartitionedDataModule(
            tmp_path / "shards", sampler=NeighborSampler([2]), loading=Loading(num_threads=0, check_values=is_on)
        )
        data.setup("fit")
        with pytest.raises(ValueError, match=f"y of node {node} is -1") if is_on else nullcontext():
            next(iter(data.train_dataloader()))
        data.teardown("fit")


def test_labels_that_are_judged_by_are_looked_at() -> None:
    graph, node = spoilt("y", -1, marked=False)
    graph.node_arrays["val_mask"] = torch.zeros(60, dtype=torch.bool).index_fill_(0, torch.tensor([node]), True)
    with pytest.raises(ValueError, match=f"y of node {node} is -1, .* val_mask"):
        of(graph).val_dataloader()
    of(graph, loading=Loading(check_values=False)).val_dataloader()
