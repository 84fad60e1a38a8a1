"""The graph: rows, degrees, induced subgraphs and halos, against brute force."""

import copy
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
from torch_geometric.data import HeteroData
from torch_geometric.utils import subgraph

from lightning_gnn_dist import (
    Graph,
    Isolated,
    Loading,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    citations,
    communities,
)
from lightning_gnn_dist.graph import graph_report
from lightning_gnn_dist.graph import rows as rows_module
from lightning_gnn_dist.graph import user_ids as ids_module
from lightning_gnn_dist.graph.graph import sampled_digest
from lightning_gnn_dist.graph.graph_report import report_of
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs, remembered
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.graph.user_ids import NodeColumns, ids_for, places_of, user_ids
from lightning_gnn_dist.graph.value_check import check_arrays, check_labels
from tests.memory import Peak, reads_memory
from tests.placing import batches_of


def random_edges(num_nodes: int = 40, num_edges: int = 200, seed: int = 0) -> Tensor:
    """Directed, with loops and duplicates; the last five nodes have no edges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes - 5, (2, num_edges), generator=generator)


def edge_pairs(graph: Graph) -> list[tuple[int, int]]:
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return sorted(zip(graph.indices.tolist(), receiver.tolist(), strict=True))


@pytest.fixture
def graph() -> Graph:
    edge_index = random_edges()
    weight = edge_index[0] * 100.0 + edge_index[1]  # tells which edge it belongs to
    return Graph.from_edge_index(edge_index, 40, {"x": torch.arange(40.0)[:, None]}, {"edge_weight": weight})


def test_rows_list_the_senders_in_order(graph: Graph) -> None:
    edge_index = random_edges()
    for node in range(40):
        row = graph.indices[graph.indptr[node] : graph.indptr[node + 1]]
        assert row.tolist() == sorted(edge_index[0][edge_index[1] == node].tolist())
    assert graph.indices.dtype == torch.int32 and graph.indptr.dtype == torch.int64


@pytest.mark.parametrize("edges_at_once", [1, 7, 1 << 24])
@pytest.mark.parametrize("nodes", [[3, 30, 7, 38, 0], list(range(39, -1, -1)), [], [37]])
def test_induced_is_the_subgraph_with_local_ids(graph, nodes, edges_at_once, monkeypatch) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", edges_at_once)
    monkeypatch.setattr(rows_module, "NODES_PER_PIECE", 2 * edges_at_once)
    monkeypatch.setattr(rows_module, "ROWS_PER_PIECE", 2 * edges_at_once)
    ids = torch.tensor(nodes, dtype=torch.int64)
    part = graph.induced(ids)
    expected, _ = subgraph(ids, random_edges(), num_nodes=40)
    n_id = part.node_arrays["n_id"]
    assert n_id.tolist() == nodes
    assert part.node_arrays["x"].flatten().tolist() == nodes
    found = sorted((nodes[u], nodes[v]) for u, v in edge_pairs(part))
    assert found == sorted(map(tuple, expected.t().tolist()))
    receiver = n_id.repeat_interleave(part.degrees())
    assert torch.equal(part.edge_arrays["edge_weight"], n_id[part.indices.long()] * 100.0 + receiver)


def test_halo_is_who_sends_from_outside(graph: Graph) -> None:
    nodes = torch.tensor([1, 5, 9, 39])
    sender, receiver = random_edges()
    outside = torch.isin(receiver, nodes) & ~torch.isin(sender, nodes)
    assert graph.halo(nodes).tolist() == sorted(set(sender[outside].tolist()))


def test_a_node_given_twice_or_outside_the_graph_is_refused(graph: Graph) -> None:
    with pytest.raises(ValueError, match="node 3 is given twice"):
        graph.induced(torch.tensor([3, 4, 3]))
    with pytest.raises(ValueError, match=r"must lie in \[0, 40\), got 3 to 40"):
        graph.induced(torch.tensor([3, 40]))


def test_a_missing_split_names_those_there_are(graph: Graph) -> None:
    with pytest.raises(ValueError, match="no train_mask"):
        graph.split("train")


def test_the_fingerprint_tells_structures_and_training_nodes_apart() -> None:
    edges = random_edges()
    mask = torch.arange(40) < 4
    plain, again = (Graph.from_edge_index(edges, 40, {"train_mask": mask}) for _ in range(2))
    others = [
        Graph.from_edge_index(edges, 41),
        Graph.from_edge_index(edges.flip(0), 40, {"train_mask": mask}),
        Graph.from_edge_index(edges, 40, {"train_mask": ~mask}),
    ]
    assert plain.fingerprint == again.fingerprint
    assert plain.fingerprint not in {other.fingerprint for other in others}


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([0]), "must hold integers, got torch.float32 and torch.int64"),
        (torch.tensor([0, 1]), torch.tensor([0.0]), "must hold integers, got torch.int64 and torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([0, 0]), "indptr must start at 0, got 1"),
        (torch.tensor([0, 2, 1, 3]), torch.tensor([0, 0, 0]), "must not fall, but row 1 goes from 2 to 1"),
        (torch.tensor([0, 1, 2]), torch.tensor([0, 2]), r"indices must lie in \[0, 2\), got 0 to 2"),
        (torch.tensor([0, 1, 2]), torch.tensor([-1, 1]), r"indices must lie in \[0, 2\), got -1 to 1"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(indptr, indices, message):
    with pytest.raises(ValueError, match=message):
        Graph(indptr, indices)


def test_a_graph_without_types_counts_as_one_of_one_type(graph: Graph) -> None:
    assert list(graph.types.node_arrays) == [""] and graph.types.node_arrays[""] is graph.node_arrays
    assert list(graph.types.edge_arrays) == [("", "", "")] and graph.types.edge_arrays["", "", ""] is graph.edge_arrays


def test_an_attribute_that_is_an_array_is_told_where_it_is() -> None:
    graph = communities(60, 2, num_features=4)
    with pytest.raises(AttributeError, match=r"^a Graph has no attribute 'x': read it as graph\.node_arrays\['x'\]$"):
        _ = graph.x  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'feat': its arrays .* y, train_mask, val_mask, test_mask$"):
        _ = graph.feat  # type: ignore[attr-defined]
    typed = citations(600, 6)
    with pytest.raises(AttributeError, match=r"'y': read it as graph\.types\.node_arrays\['paper'\]\['y'\]$"):
        _ = typed.y  # type: ignore[attr-defined]
    assert not hasattr(graph, "x") and copy.deepcopy(graph).num_nodes == 60
    assert "node_arrays=['x', 'y', " in repr(graph) and "edge_arrays=[]" in repr(graph)


# What the report of a graph says, on graphs where one can count.


def test_it_counts_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_report, "EDGES_AT_ONCE", 2)
    arrays = {"y": torch.tensor([0, 0, 1, -1, 0, 2]), "train_mask": torch.tensor([True] + [False] * 5)}
    ends = torch.tensor([[1, 2, 3, 4, 0], [0, 0, 0, 0, 1]])  # 1 to 4 send to 0, and 0 to 1; 5 is alone
    lines = report_of(Graph.from_edge_index(ends, 6, arrays)).splitlines()
    assert lines[0] == "6 nodes, 5 edges, 0.0 MB" and "y (int64 [6])" in lines[1]
    assert "0 in the median, at most 1 for nine in ten, 4 at most; 4 nodes have none" in lines[2]
    assert lines[3] == "directed: not every edge has its reverse"
    assert lines[4:] == ["labels: 3 classes, 75% of the edges between nodes of one label", "split: 1 train (16.7%)"]


def test_a_graph_on_disk_reports_the_same(tmp_path: Path) -> None:
    graph = communities(500)
    graph.save(tmp_path / "graph")
    assert report_of(Graph.open(tmp_path / "graph")) == report_of(graph)
    assert "every node sends as many edges as it receives" in report_of(graph)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_it_counts_by_type(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Authors 0 and 1 write paper 0, author 1 writes paper 1 twice; paper 2 cites 0; nobody is at the venue."""
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", at_once)
    data = HeteroData()
    data["paper"].x, data["paper"].y = torch.ones(3, 4), torch.tensor([0, 2, -1])
    data["paper"].train_mask = torch.tensor([True, True, False])
    data["author"].num_nodes, data["venue"].num_nodes = 2, 1
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    data["author", "writes", "paper"].time = torch.tensor([4, 3, 2, 1])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[2], [0]])
    data["paper", "at", "venue"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert [" ".join(line.split()) for line in report_of(Graph.from_pyg(data, time="time")).splitlines()] == [
        "6 nodes of 3 types, 5 edges of 3 types, 0.0 MB",
        "nodes number MB split labels arrays",
        "paper 3 0.0 2 train 2 classes x (float32 x 4), y (int64), train_mask (bool)",
        "author 2 0.0 - - -",
        "venue 1 0.0 - - -",
        "edges number MB received by at most arrays",
        "author writes paper 4 0.0 67% of paper 2 time (int64)",
        "paper cites paper 1 0.0 33% of paper 1 -",
        "paper at venue 0 0.0 0% of venue 0 -",
        "edges of one type into a node are in order of time, then the sender",
    ]


# Looking up node ids.


@pytest.mark.parametrize("most", [40, 100_000], ids=["dense", "sparse"])
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("num_asked", [3, 500], ids=["few", "many"])
@pytest.mark.parametrize("first", [0, 7_000])
def test_ids_are_found_where_they_are(most: int, is_sorted: bool, num_asked: int, first: int) -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randperm(most, generator=generator)[:20] + first
    nodes = nodes.sort().values if is_sorted else nodes
    some = nodes[torch.randint(20, (num_asked,), generator=generator)]
    asked = torch.where(torch.rand(num_asked, generator=generator) < 0.5, some, some + first // 2 - 2)
    places = {node: at for at, node in enumerate(nodes.tolist())}
    lookup = Lookup(nodes)
    for _ in range(2):
        at, is_found = lookup(asked)
        assert is_found.tolist() == lookup.contains(asked).tolist() == [node in places for node in asked.tolist()]
        assert at.tolist() == [places[node] for node in asked.tolist() if node in places]


# Nodes are found by users' ids, and no more of the files is read than is asked for.


@pytest.mark.parametrize("ids", [["b", "a", "longer", "ü", "c"], [7, -3, 900, 2**40], ["b"]])
def test_a_node_is_found_by_its_id(ids: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "_AT_ONCE", 2)
    array = np.array(ids)
    missing = np.array(["zz"]) if array.dtype.kind == "U" else np.array([5])
    asked = np.concatenate([array[::-1], missing, array[:1]])
    assert places_of(array, asked).tolist() == [*reversed(range(len(ids))), -1, 0]


@reads_memory
def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """The ids of a million nodes take 32 MB."""
    count, path = 1_000_000, tmp_path / "graph"
    Graph.from_edge_index(torch.zeros(2, 1).long(), count, {"x": torch.zeros(count, 1)}).save(path)
    (path / "ids").mkdir()
    names = np.char.add("W", np.arange(count).astype("U7"))
    np.save(path / "ids" / "nodes.npy", names)
    nodes = np.array([3, count - 1, 400_000, 3])
    with Peak("VmRSS") as peak:
        found = ids_for(None, path, "", count)
        assert NodeColumns(found, nodes)(0, np.zeros((4, 1)))["node"].tolist() == names[nodes].tolist()
    assert found is not None and len(found) == count
    assert peak.added_bytes < 4 << 20
    with Peak("RssAnon") as peak:
        Graph.open(path).save(tmp_path / "copy")
    assert peak.added_bytes < 24 << 20
    assert (user_ids(tmp_path / "copy") == names).all()


# The built-in graph has the properties that its docstring promises.


def test_edges_are_symmetric_distinct_and_mostly_inside_communities() -> None:
    graph = communities(4000, 5, homophily=0.8)
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    sender = graph.indices.long()
    forth, back = sender * 4000 + receiver, receiver * 4000 + sender
    assert torch.equal(forth.sort().values, back.sort().values)
    assert forth.unique().numel() == graph.num_edges and not (sender == receiver).any()
    label = graph.node_arrays["y"]
    assert (label[sender] == label[receiver]).float().mean() == pytest.approx(0.8 + 0.2 / 5, abs=0.03)
    assert graph.num_edges / 4000 == pytest.approx(10, rel=0.1)


def test_every_node_is_in_one_split() -> None:
    graph = communities(1000, train_share=0.2)
    masks = torch.stack([graph.node_arrays[f"{name}_mask"] for name in ("train", "val", "test")]).int()
    assert masks.sum(0).eq(1).all() and masks.sum(1).tolist() == [200, 400, 400]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least twice"):
        communities(5, 8)


def test_a_graph_that_no_machine_holds_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="So large a graph would take"):
        communities(1000, 2, num_features=10**9)


def test_the_seed_decides_every_type() -> None:
    first, again, other = citations(800, 4), citations(800, 4), citations(800, 4, seed=1)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    first.check_edges()


def test_too_few_papers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_papers \(300\) must be at least 100 times num_fields \(4\)"):
        citations(300, 4)


# Values that would poison a training are told of at its start, by the node's own number.


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
