"""A folder that PyG's own ``Partitioner`` wrote becomes the graph that was partitioned; damaged ones are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import Partitioner, partition

from lightning_gnn_dist import Graph, prepare_graph
from tests.graph.equal import check_equal

PARTS = 3


class Clusters:
    """What PyG's ``ClusterData`` makes, which needs a library that is not here: parts at random, one of them small."""

    def __init__(self, data: Data, num_parts: int, **_: Any) -> None:
        owner = torch.randint(num_parts, (data.num_nodes,), generator=torch.Generator().manual_seed(1))
        self._data, self._nodes = data, owner.argsort()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), owner.bincount(minlength=num_parts).cumsum(0)])
        place = self._nodes.argsort()
        edges = place[data.edge_index[1]].argsort(stable=True)
        self._ends = place[data.edge_index[:, edges]]
        self._of_part = [(self._ends[1] >= one) & (self._ends[1] < other) for one, other in pairwise(starts)]
        self._starts = starts
        self.partition = SimpleNamespace(node_perm=self._nodes, partptr=starts, edge_perm=edges)

    def __getitem__(self, part: int) -> Data:
        own, nodes = self._of_part[part], self._nodes[self._starts[part] : self._starts[part + 1]]
        edges = self.partition.edge_perm[own]
        out = Data(num_nodes=len(nodes))
        for name, value in self._data.items():
            if name not in ("edge_index", "num_nodes"):
                out[name] = value[nodes if self._data.is_node_attr(name) else edges]
        out.edge_index = torch.stack([self._ends[0, own], self._ends[1, own] - self._starts[part]])
        return out


@pytest.fixture(autouse=True)
def _clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "ClusterData", Clusters)


def one_type() -> Data:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randperm(400, generator=generator)[:90]  # no edge twice
    data = Data(x=torch.randn(20, 3, generator=generator, dtype=torch.float64))
    data.edge_index = torch.stack([keys // 20, keys % 20])
    data.edge_attr = torch.randn(90, 2, generator=generator, dtype=torch.float64)
    return data


def types() -> HeteroData:
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    for kind, count in (("paper", 12), ("author", 7)):
        data[kind].x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    for source, name, target, width in (("author", "writes", "paper", 12), ("paper", "cites", "paper", 12)):
        keys = torch.randperm(len(data[source].x) * width, generator=generator)[:40]
        data[source, name, target].edge_index = torch.stack([keys // width, keys % width])
        data[source, name, target].edge_attr = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    return data


@pytest.mark.parametrize("make", [one_type, types])
@pytest.mark.parametrize("memory_bytes", [2_000, 2_000_000_000])
def test_it_is_the_graph_that_was_partitioned(make: Any, memory_bytes: int, tmp_path: Path) -> None:
    data = make()
    Partitioner(data, PARTS, str(tmp_path / "parts")).generate_partition()
    prepare_graph(tmp_path / "parts", tmp_path / "graph", drop=["part"], memory_bytes=memory_bytes)
    check_equal(Graph.open(tmp_path / "graph"), Graph.from_pyg(data))


def test_the_partition_is_kept(tmp_path: Path) -> None:
    Partitioner(types(), PARTS, str(tmp_path / "parts")).generate_partition()
    prepare_graph(tmp_path / "parts", tmp_path / "graph")
    found = Graph.open(tmp_path / "graph").arrays
    for kind in ("paper", "author"):
        expected = torch.load(tmp_path / "parts" / "node_map" / f"{kind}.pt")
        assert torch.equal(found[f"nodes/{kind}/part"], expected) and expected.unique().numel() > 1


@pytest.mark.parametrize("make", [one_type, types])
def test_labels_and_masks_come_beside(make: Any, tmp_path: Path) -> None:
    data, more = make(), {"y": np.arange(12) % 3, "train_mask": np.arange(12) < 5}
    more = more if isinstance(data, HeteroData) else {name: np.resize(array, 20) for name, array in more.items()}
    Partitioner(data, PARTS, str(tmp_path / "parts")).generate_partition()
    (tmp_path / "more").mkdir()
    of_type = isinstance(data, HeteroData)
    np.savez(tmp_path / "more" / "paper.npz", **more)
    nodes = tmp_path / "more" if of_type else tmp_path / "more" / "paper.npz"
    prepare_graph(tmp_path / "parts", tmp_path / "graph", nodes=nodes, drop=["part"])
    (data["paper"] if of_type else data).update({name: torch.from_numpy(array) for name, array in more.items()})
    check_equal(Graph.open(tmp_path / "graph"), Graph.from_pyg(data))


def test_times_of_nodes_and_edges(tmp_path: Path) -> None:
    for name, of in (("time", "paper"), ("edge_time", ("paper", "cites", "paper"))):
        data, stores = types(), []
        for kind in data.node_types if name == "time" else data.edge_types:
            data[kind][name] = torch.arange(len(data[kind].x) if name == "time" else 40) * 7 % 11
            stores.append(kind)
        assert of in stores
        Partitioner(data, PARTS, str(tmp_path / name)).generate_partition()
        prepare_graph(tmp_path / name, tmp_path / f"{name}_graph", time=name, drop=["part"])
        check_equal(Graph.open(tmp_path / f"{name}_graph"), Graph.from_pyg(data, time=name))


def _change(file: Path, **values: Any) -> None:
    content = torch.load(file, weights_only=False)
    torch.save(content | values, file)


def _meta(folder: Path, **values: Any) -> None:
    about = json.loads((folder / "META.json").read_text())
    (folder / "META.json").write_text(json.dumps(about | values))


def _name_a_stranger(folder: Path) -> None:
    senders = torch.load(folder / "part_0" / "graph.pt")["row"]
    _change(folder / "part_0" / "graph.pt", row=torch.full_like(senders, 99))


class Unknown:
    """What a file may not hold."""


BAD: list[tuple[Any, str]] = [
    (lambda folder: (folder / "META.json").write_text("{"), "META.json is damaged"),
    (lambda folder: _meta(folder, num_parts="three"), "the entry 'num_parts' is"),
    (lambda folder: _meta(folder, num_parts=4), "part_3/graph.pt is missing"),
    (lambda folder: (folder / "node_map.pt").unlink(), "node_map.pt is missing"),
    (lambda folder: (folder / "part_1" / "graph.pt").write_bytes(b"no"), "part_1/graph.pt cannot be read"),
    (
        lambda folder: torch.save({"x": Unknown()}, folder / "part_1" / "graph.pt"),
        "cannot be read without running code",
    ),
    (lambda folder: torch.save(torch.zeros(9, dtype=torch.int64), folder / "node_map.pt"), "node_map.pt is of 9 nodes"),
    (lambda folder: torch.save(torch.full((20,), 7), folder / "node_map.pt"), "names part 7, and there are 3"),
    (lambda folder: torch.save(torch.zeros(80), folder / "edge_map.pt"), "edge_map.pt is of 80 edges"),
    (lambda folder: _change(folder / "part_0" / "graph.pt", row=torch.arange(2)), "and other numbers of ends"),
    (lambda folder: _change(folder / "part_0" / "node_feats.pt", feats={}), "holds 0 rows of 'x', not"),
    (_name_a_stranger, "part_0/graph.pt names the sender 99, but there are 20 nodes"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_damaged_folder_gets_one_sentence(change: Any, message: str, tmp_path: Path) -> None:
    Partitioner(one_type(), PARTS, str(tmp_path / "parts")).generate_partition()
    change(tmp_path / "parts")
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        prepare_graph(tmp_path / "parts", tmp_path / "graph")
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 700 and not (tmp_path / ".graph.preparing").exists()
