"""`prepare` as a command: what it says before, while and after it works, and how it refuses."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.shard import Shard


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    path = tmp_path / "edges.csv"
    path.write_text("".join(f"{node},{(node * 7 + 1) % 50}\n" for node in range(1, 50)))
    return path


def test_an_edge_list_becomes_a_graph(edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph"
    main(["prepare", str(edges), str(out), "--undirected", "--split", "0.6", "0.2", "0.2", "--seed", "1"])
    said = capsys.readouterr()
    assert re.search(r"49 edges. .* of disk, 2.0 GB of RAM beside 24 bytes a node.* minutes", said.out)
    assert re.search(r"reading edges: .* s\n.*counting edges: .*sorting edges: .*fingerprint: ", said.err, re.DOTALL)
    assert "split: 30 train, 10 val, 10 test" in said.out
    assert "reverse" not in said.out
    graph = Graph.open(out)
    assert graph.num_nodes == 50 and graph.split("val").numel() == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "graph"]  # no draft is left


def test_it_says_what_training_will_miss(edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", str(edges), str(tmp_path / "graph")])
    said = capsys.readouterr().out
    assert "There is no train_mask" in said and "prepare it with --undirected" in said


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["prepare", *arguments])
    return str(stop.value)


def test_a_graph_is_replaced_only_when_asked(edges: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "graph")
    main(["prepare", str(edges), out])
    assert "graph exists already: choose another path, or add --overwrite" in refused(str(edges), out)
    main(["prepare", str(edges), out, "--overwrite", "--undirected"])
    assert Graph.open(out).num_edges > 50
    (tmp_path / "mine").mkdir()
    assert "is not a saved graph" in refused(str(edges), str(tmp_path / "mine"), "--overwrite")


def test_a_target_of_regression_is_accepted_by_name(tmp_path: Path) -> None:
    torch.save(Data(y=torch.rand(3), edge_index=torch.tensor([[0], [1]]), num_nodes=3), tmp_path / "data.pt")
    source, out = str(tmp_path / "data.pt"), str(tmp_path / "graph")
    assert "float_labels=True" in refused(source, out)
    assert not (tmp_path / "graph").exists()
    main(["prepare", source, out, "--float-labels"])
    assert Graph.open(out).node_arrays["y"].is_floating_point()


@pytest.mark.parametrize("option", ["--memory", "--out-of-core"])
def test_less_memory_gives_the_same(option: str, edges: Path, tmp_path: Path) -> None:
    for name, more in (("expected", []), ("graph", [option, "0.001"])):
        main(["prepare", str(edges), str(tmp_path / name), "--undirected", "--split", "0.6", "0.2", "0.2", *more])
    assert Graph.open(tmp_path / "graph").fingerprint == Graph.open(tmp_path / "expected").fingerprint
    assert "nowhere does not exist" in refused("nowhere", str(tmp_path / "other"))


def test_memory_that_cannot_work_is_refused_with_the_least(
    edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("0.000001", "0.0009"):
        with pytest.raises(SystemExit):
            main(["prepare", str(edges), str(tmp_path / "graph"), "--memory", given])
        assert f"--out-of-core: must be at least 0.001 (1.0 MB), got {given}" in capsys.readouterr().err
    assert not (tmp_path / "graph").exists()


def test_a_host_prepares_its_own_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "shares"
    source.mkdir()
    np.save(source / "edge_index.npy", np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))
    np.save(source / "x.npy", np.ones((4, 2), np.float32))
    np.save(source / "train_idx.npy", np.array([0, 3]))
    for index in (0, 1):
        main(["prepare", str(source), str(out), "--undirected", "--shard", str(index), "--num-shards", "2"])
        assert f"share-0000{index}: 2 nodes, 4 edges" in capsys.readouterr().out
    assert [Shard.open(out, index).rows.indices.tolist() for index in (0, 1)] == [[1, 3, 0, 2], [1, 3, 0, 2]]
    with pytest.raises(SystemExit, match="exists already"):
        main(["prepare", str(source), str(out), "--undirected", "--shard", "0", "--num-shards", "2"])
    with pytest.raises(SystemExit, match="--shard and --num-shards belong together"):
        main(["prepare", str(source), str(out), "--shard", "0"])
    with pytest.raises(SystemExit, match="add --shard"):
        main(["prepare", str(source), str(out), "--assignment", "parts.npy"])


def test_a_saved_graph_is_no_source(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"x": torch.ones(2, 3)}).save(path)
    with pytest.raises(SystemExit, match="saved graph already"):
        main(["prepare", str(path), str(path), "--overwrite"])
    (path / "changes").mkdir()
    with pytest.raises(SystemExit, match=r"graph/changes holds changes .* which this release does not read"):
        main(["prepare", str(path), str(path), "--overwrite"])
