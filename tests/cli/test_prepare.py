"""`prepare` as a command: what it says before, while and after it works, and how it refuses."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

import lightning_gnn_dist as lgd
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Plan
from tests.cli.conftest import Refused
from tests.python_server import fast_python


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    path = tmp_path / "edges.csv"
    path.write_text("".join(f"{node},{(node * 7 + 1) % 50}\n" for node in range(1, 50)))
    return path


def test_an_edge_list_becomes_a_graph(edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "graph"
    main(["prepare", str(edges), str(out), "--undirected", "--split", "0.6", "0.2", "0.2", "--seed", "1"])
    said = capsys.readouterr()
    assert re.search(r"reading edges: .* s\n.*counting edges: .*sorting edges: .*fingerprint: ", said.err, re.DOTALL)
    assert "split: 30 train, 10 val, 10 test" in said.out
    assert "reverse" not in said.out
    graph = lgd.Graph.open(out)
    assert graph.num_nodes == 50 and graph.split("val").numel() == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "graph"]  # no draft is left


def test_it_says_what_training_will_miss(edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prepare", str(edges), str(tmp_path / "graph")])
    said = capsys.readouterr().out
    assert "There is no train_mask" in said and "prepare it with --undirected" in said


def test_a_graph_is_replaced_only_when_asked(edges: Path, tmp_path: Path, refused: Refused) -> None:
    out = str(tmp_path / "graph")
    main(["prepare", str(edges), out])
    assert "graph exists already: choose another path, or add --overwrite" in refused("prepare", str(edges), out)
    main(["prepare", str(edges), out, "--overwrite", "--undirected"])
    assert lgd.Graph.open(out).num_edges > 50
    (tmp_path / "mine").mkdir()
    assert "is not a saved graph" in refused("prepare", str(edges), str(tmp_path / "mine"), "--overwrite")


def test_a_target_of_regression_is_accepted_by_name(tmp_path: Path, refused: Refused) -> None:
    torch.save(Data(y=torch.rand(3), edge_index=torch.tensor([[0], [1]]), num_nodes=3), tmp_path / "data.pt")
    source, out = str(tmp_path / "data.pt"), str(tmp_path / "graph")
    assert "float_labels=True" in refused("prepare", source, out)
    assert not (tmp_path / "graph").exists()
    main(["prepare", source, out, "--float-labels"])
    assert lgd.Graph.open(out).node_arrays["y"].is_floating_point()


def test_memory_that_cannot_work_is_refused_with_the_least(edges: Path, tmp_path: Path, refused: Refused) -> None:
    for given in ("0.000001", "0.0009"):
        said = refused("prepare", str(edges), str(tmp_path / "graph"), "--memory", given)
        assert f"--memory: must be at least 0.001 (1.0 MB), got {given}" in said
    assert "nowhere does not exist" in refused("prepare", "nowhere", str(tmp_path / "graph"), "--memory", "0.001")
    assert not (tmp_path / "graph").exists()


def test_a_saved_graph_is_no_source(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "graph"
    lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"x": torch.ones(2, 3)}).save(path)
    assert "saved graph already" in refused("prepare", str(path), str(path), "--overwrite")
    (path / "changes").mkdir()
    said = refused("prepare", str(path), str(path), "--overwrite")
    assert re.search(r"graph/changes holds changes .* which this release does not read", said)


# `inspect` as a command.


@pytest.fixture
def graph(tmp_path: Path) -> str:
    lgd.communities(2000).save(tmp_path / "graph")
    return str(tmp_path / "graph")


def test_a_graph_alone(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph])
    said = capsys.readouterr().out
    assert said.startswith("2,000 nodes, ") and "parts" not in said


def test_a_typed_graph_and_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgd.citations(600).save(tmp_path / "graph")
    for more in (["--check"], ["--parts", "2", "--partitioner", "metis"]):
        main(["inspect", str(tmp_path / "graph"), *more])
    said = capsys.readouterr().out
    assert "author writes paper" in said and "all arrays are what was saved" in said
    assert "RAM for a part: " in said and "with Halo(1), " in said
    assert "The parts hold different labels" in said and "GrappaStrategy()" in said
    assert "fan-out" not in said and "NeighborSampler" not in said  # which is one for each edge type


def test_several_partitions_with_what_follows(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph, "--parts", "2", "--partitioner", "metis", "random", "supernodes", "--balance", "train"])
    said = capsys.readouterr().out
    assert "MetisPartitioner(balance='train'" in said and "\nSuperNodePartitioner()\n" in said
    assert said.count("RAM for a part: ") == said.count("2 parts: ") == 3
    assert said.count("of label skew beyond chance") == 3
    assert len(list((Path(graph) / "partitions").iterdir())) == 3  # where a fit will find them


def test_memory_is_that_of_parts(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph, "--parts", "3", "--partitioner", "random"])
    said, whole = capsys.readouterr().out, lgd.Graph.open(graph)
    plan = Plan(whole, lgd.RandomPartitioner()(whole, 3, 0), lgd.Holding(), 3, 0)
    for boundary in (lgd.Isolated(), lgd.Halo(1)):
        readers = [Parts(plan, rank, boundary, lgd.Coverage()) for rank in range(3)]
        taken = [reader.read(0).graph.num_bytes for reader in readers]
        assert f"{in_bytes(sum(taken) / 3)} in the mean, {in_bytes(max(taken))} at most" in said
    assert " are left here\n" in said


def test_what_cannot_be_done_is_said(graph: str, tmp_path: Path, refused: Refused) -> None:
    assert "is not a saved graph" in refused("inspect", str(tmp_path))
    assert "num_parts (3000) must not exceed the graph's nodes" in refused("inspect", graph, "--parts", "3000")


def check_files_are_compared(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That `inspect --check` notices a bit that changes in a saved folder."""
    main(["inspect", "--check", str(path)])
    assert "all arrays are what was saved" in capsys.readouterr().out
    x = next(path.rglob("x.npy"))
    content = x.read_bytes()
    x.unlink()
    x.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit, match=r"x\.npy is not the file that was saved"):
        main(["inspect", "--check", str(path)])


def test_all_files_are_compared_with_what_was_saved(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_files_are_compared(Path(graph), capsys)


# The demo, run as a user runs it: as a command that starts its own processes.


@pytest.mark.slow
def test_the_demo_prints_the_reports_and_the_table(tmp_path: Path) -> None:
    command = [fast_python(), "-m", "lightning_gnn_dist", "demo", "--nodes", "2000", "--rounds", "3", "--steps", "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert "2 parts:" in output and "worst label skew" in output
    row = r"^(one process|Grappa|local SGD|LLCG).*?(0\.\d{3})\s+([\d.]+) MB\s+([\d.]+)$"
    rows = re.findall(row, output, re.MULTILINE)
    assert len(rows) == 6
    assert float(rows[0][2]) == 0.0 and all(float(sent) > 0 for _, _, sent, _ in rows[1:])
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


def test_one_rank_is_refused(refused: Refused) -> None:
    assert "--ranks must be at least 2" in refused("demo", "--ranks", "1")
