"""Values that would poison a training are told of at its start, by the node's own number."""

import gc
import os
import resource
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, Isolated, Loading, NeighborSampler, Partition, PartitionedDataModule, communities
from lightning_gnn_dist.graph.graph import sampled_digest
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs, remembered
from lightning_gnn_dist.graph.value_check import check_arrays, check_labels
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


def check(graph: Graph) -> None:
    check_arrays(graph)
    check_labels(graph, graph.split("train"), "train_mask")


@pytest.mark.parametrize(("name", "value", "arrays", "words"), WORDS)
def test_a_bad_value_is_told_of_with_its_node(name: str, value: float, arrays: dict[str, Any], words: str) -> None:
    graph, node = spoilt(name, value, **arrays)
    with pytest.raises(ValueError, match=words.format(node=node)):
        check(graph)


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
    check(graph)


def test_values_that_came_after_a_check_are_found() -> None:
    graph, node = spoilt("x", 1.0)
    check(graph)
    graph.node_arrays["x"][node, 0] = NAN
    with pytest.raises(ValueError, match=f"x of node {node} is NaN"):
        check(graph)


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


def test_labels_that_are_judged_by_are_looked_at() -> None:
    graph, node = spoilt("y", -1, marked=False)
    graph.node_arrays["val_mask"] = torch.zeros(60, dtype=torch.bool).index_fill_(0, torch.tensor([node]), True)
    with pytest.raises(ValueError, match=f"y of node {node} is -1, .* val_mask"):
        of(graph).val_dataloader()
    of(graph, loading=Loading(check_values=False)).val_dataloader()


# Digests tell arrays apart that were drawn otherwise, and read little of what is large.


def arrays(seed: int = 0, rows: int = 100) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    y = torch.randint(0, 5, (rows,), generator=generator)
    return {"x": x, "half": x.bfloat16(), "y": y, "mask": y > 2, "none": x[:, :0]}


def told_apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    (digest, values), (another, others) = sampled_digest(one), sampled_digest(other)
    return digest != another or any(abs(a - b) > 2e-4 for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize("rows", [100, 300_000])
def test_what_was_drawn_or_named_otherwise_is_told_apart(rows: int) -> None:
    one, other = arrays(0, rows), arrays(1, rows)
    assert not told_apart(one, arrays(0, rows))
    for name in ("x", "half", "y"):
        assert told_apart(one, one | {name: other[name]}), name
    assert told_apart(one, one | {"more": one["y"]})
    assert told_apart(one, one | {"x": one["x"].double()})
    assert told_apart(one, one | {"x": one["x"][1:]})


def test_last_digits_and_numbers_that_are_none_do_not_tell_apart() -> None:
    one = arrays()
    assert not told_apart(one, one | {"x": one["x"] * (1 + 1e-6)})
    one["x"][3] = torch.nan
    assert not told_apart(one, {name: array.clone() for name, array in one.items()})
    assert not told_apart({"x": torch.zeros(3, 0)}, {"x": torch.zeros(3, 0)})


def test_of_a_large_file_few_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (1 << 28, 64))  # 64 GB of holes: more than there is RAM
    mapped = torch.from_numpy(np.load(path, mmap_mode="r+"))
    before = pages_touched()
    sampled_digest({"x": mapped, "y": mapped.view(torch.int32)})
    assert pages_touched() - before < 50_000  # of 16 million


def pages_touched() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


# What is remembered of a graph.


def chain():
    return Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)


def test_two_threads_find_out_once_and_other_keys_apart():
    graph, found = chain(), []

    def find():
        found.append(threading.get_ident())
        time.sleep(0.05)
        return len(found)

    values = []
    threads = [threading.Thread(target=lambda: values.append(remembered(graph, "a", find))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1, 1, 1]
    assert len(found) == 1
    assert remembered(graph, "b", find) == 2
    assert remembered(chain(), "a", find) == 3


def test_what_is_remembered_goes_with_the_graph():
    graph = chain()
    value = remembered(graph, "tensor", lambda: torch.ones(3))
    assert [found for _, found in of_all_graphs("tensor")] == [value]
    value, held = None, weakref.ref(value)
    del graph
    gc.collect()
    assert held() is None
    assert of_all_graphs("tensor") == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have():
    graph, holds, done = chain(), threading.Event(), threading.Event()

    def hold():
        with memory_of(graph):
            holds.set()
            done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(30)
    if (child := os.fork()) == 0:
        os._exit(remembered(graph, "a", lambda: 7))
    deadline, code = time.monotonic() + 60, 0
    while time.monotonic() < deadline and not (status := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.01)
    if status[0]:
        code = os.waitstatus_to_exitcode(status[1])
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert code == 7
