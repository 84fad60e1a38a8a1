"""A saved graph: the same after opening, cheap to open, refused when damaged, never half-written."""

import json
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, NeighborSampler, PartitionedDataModule, communities
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.user_ids import nodes_with_ids, user_ids
from tests.graph.equal import check_equal
from tests.graph.test_graph import random_edges
from tests.ranks import run_ranks


@pytest.fixture
def graph() -> Graph:
    edges = random_edges()
    arrays = {
        "x": torch.randn(40, 3, generator=torch.Generator().manual_seed(0)),
        "half": torch.randn(40, 2).bfloat16(),
        "y": torch.arange(40),
        "train_mask": torch.arange(40) < 9,
    }
    return Graph.from_edge_index(edges, 40, arrays, {"edge_type": edges[0] % 3})


@pytest.fixture
def saved(graph: Graph, tmp_path: Path) -> Path:
    graph.save(tmp_path / "graph")
    return tmp_path / "graph"


def test_everything_comes_back(graph: Graph, saved: Path) -> None:
    opened = Graph.open(saved)
    assert opened.path == saved
    check_equal(opened, graph)


def test_a_graph_without_edges_comes_back(tmp_path: Path) -> None:
    Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 3).save(tmp_path / "graph")
    opened = Graph.open(str(tmp_path / "graph"))
    assert (opened.num_nodes, opened.num_edges) == (3, 0)


def test_writing_to_an_opened_graph_does_not_reach_the_file(graph: Graph, saved: Path) -> None:
    Graph.open(saved).node_arrays["x"].zero_()
    assert torch.equal(Graph.open(saved).node_arrays["x"], graph.node_arrays["x"])


def test_an_opened_graph_travels_as_its_path(saved: Path) -> None:
    sent = pickle.dumps(Graph.open(saved))
    assert len(sent) < 500 and pickle.loads(sent).num_nodes == 40


def test_opening_reads_no_features(tmp_path: Path) -> None:
    num_nodes = 1000
    edges = torch.zeros(2, 0, dtype=torch.long)
    Graph.from_edge_index(edges, num_nodes, {"x": torch.zeros(num_nodes, 4)}).save(tmp_path / "graph")
    huge = tmp_path / "graph" / "nodes" / "x.npy"  # a sparse file: 400 GB that nobody could read
    np.lib.format.open_memmap(huge, mode="w+", dtype=np.float32, shape=(num_nodes, 100_000_000)).flush()
    meta = json.loads((tmp_path / "graph" / "meta.json").read_text())
    meta["arrays"]["nodes/x"]["shape"] = [num_nodes, 100_000_000]
    (tmp_path / "graph" / "meta.json").write_text(json.dumps(meta))
    assert Graph.open(tmp_path / "graph").node_arrays["x"].shape == (num_nodes, 100_000_000)


def test_an_existing_path_is_kept_unless_asked(graph: Graph, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="overwrite=True"):
        graph.save(saved)
    other = Graph.from_edge_index(random_edges(), 50)
    other.save(saved, overwrite=True)
    assert Graph.open(saved).num_nodes == 50
    (tmp_path / "precious").mkdir()
    with pytest.raises(FileExistsError, match="not a saved graph"):
        graph.save(tmp_path / "precious", overwrite=True)


def test_a_graph_is_not_saved_onto_itself(saved: Path) -> None:
    with pytest.raises(ValueError, match="another path"):
        Graph.open(saved).save(saved, overwrite=True)


def test_a_graph_with_changes_beside_it_is_refused_by_name(graph: Graph, saved: Path) -> None:
    (saved / "ids").mkdir()
    np.save(saved / "ids" / "nodes.npy", np.arange(graph.num_nodes))
    sent = pickle.dumps(Graph.open(saved))
    (saved / "changes" / "000001").mkdir(parents=True)
    says = re.escape(f"{saved}/changes holds changes of a saved graph, which this release does not read: write them ")
    reads: list[Callable[[Path], object]] = [
        Graph.open,
        user_ids,
        lambda path: nodes_with_ids(path, [3]),
        lambda path: PartitionedDataModule(path, sampler=NeighborSampler([2])),
        lambda path: pickle.loads(sent),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=says):
            read(saved)


def test_versions_that_a_release_before_has_counted_are_no_obstacle(graph: Graph, saved: Path) -> None:
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | {"history": [{"": 30}]}))
    assert Graph.open(saved).fingerprint == graph.fingerprint


def test_a_failure_leaves_nothing_behind(
    graph: Graph, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(store, "save_for_good", full_disk)
    with pytest.raises(OSError, match="No space left"):
        graph.save(tmp_path / "second")
    with pytest.raises(OSError, match="No space left"):
        graph.save(saved, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph"]
    assert Graph.open(saved).num_nodes == 40


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a saved graph"):
        Graph.open(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": "parquet"}')
    with pytest.raises(ValueError, match="not a graph saved by this package"):
        Graph.open(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="damaged"):
        Graph.open(tmp_path)


def test_a_name_cannot_leave_the_directory(graph: Graph, saved: Path, tmp_path: Path) -> None:
    graph.node_arrays["../../evil"] = torch.zeros(40)
    with pytest.raises(ValueError, match=r"'\.\./\.\./evil' cannot be the name|\.\./\.\./evil cannot be the name"):
        graph.save(tmp_path / "second")
    meta = json.loads((saved / "meta.json").read_text())
    meta["arrays"]["nodes/../../secret"] = meta["arrays"]["nodes/y"]
    (saved / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="cannot be the name"):
        Graph.open(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph"]


def test_a_newer_version_is_refused(saved: Path) -> None:
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(ValueError, match=r"version 99.*upgrade"):
        Graph.open(saved)


def open_under_a_limit(rank: int, world_size: int, path: str) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 20_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        Graph.open(path)
    except MemoryError as error:
        return str(error).replace(f"{limit:,}", "LIMIT")
    return ""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_limit_on_maps_is_named(tmp_path: Path) -> None:
    x = torch.zeros(1000, 100_000, dtype=torch.int8)
    Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 1000, {"x": x}).save(tmp_path / "graph")
    (said,) = run_ranks(open_under_a_limit, 1, str(tmp_path / "graph"))
    assert "x.npy cannot be mapped: its 100,000,128 bytes" in said
    assert "ulimit -v: LIMIT bytes" in said


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_replaced(tmp_path: Path, exists: bool) -> None:
    graph = communities(30, 2)
    if exists:
        graph.save(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(FileExistsError, match="link is a link"):
        graph.save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 1 + exists


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(">f4"), "holds >f4, which torch cannot compute with"),
        (np.asfortranarray, "is stored by column"),
    ],
)
def test_other_layouts_are_called_by_their_names(saved: Path, change: Callable[[Any], Any], message: str) -> None:
    file = saved / "nodes" / "x.npy"
    x = np.load(file)
    file.unlink()
    np.save(file, change(x))
    with pytest.raises(ValueError, match=rf"x\.npy cannot be used \(.*{message}"):
        Graph.open(saved)


def test_a_conjugate_is_saved_as_what_it_means(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3j])
    Graph(torch.tensor([0, 1, 1]), torch.tensor([1]), {"z": z.conj()}).save(tmp_path / "graph")
    assert Graph.open(tmp_path / "graph").node_arrays["z"].tolist() == [1 - 2j, -3j]


def test_a_graph_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    def graph() -> Graph:
        return Graph(torch.tensor([0, 1, 1]), torch.tensor([1]), {"z": torch.ones(2)})

    with pytest.raises(ValueError, match=r"beside holds \['indices'\], which are arrays of the graph"):
        graph().save(tmp_path / "graph", beside={"indices": torch.zeros(1)})
    changed = graph()
    changed.indices[0] = 7
    with pytest.raises(ValueError, match="indices must lie in"):
        changed.save(tmp_path / "graph")
    changed = graph()
    changed.node_arrays["z"] = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient"):
        changed.save(tmp_path / "graph")
