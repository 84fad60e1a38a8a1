"""`inspect` as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.data.links import split_edges
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.graph.typed.synthetic import citations
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.prepare.shard import save_shards


@pytest.fixture
def graph(tmp_path: Path) -> str:
    communities(2000).save(tmp_path / "graph")
    return str(tmp_path / "graph")


def test_a_graph_alone(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph])
    said = capsys.readouterr().out
    assert said.startswith("2,000 nodes, ") and "parts" not in said


def test_a_typed_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    citations(600).save(tmp_path / "graph")
    main(["inspect", str(tmp_path / "graph")])
    assert "author writes paper" in capsys.readouterr().out
    main(["inspect", "--check", str(tmp_path / "graph")])
    assert "all arrays are what was saved" in capsys.readouterr().out


def test_several_partitions_with_what_follows(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph, "--parts", "2", "--partitioner", "metis", "random", "supernodes", "--balance", "train"])
    said = capsys.readouterr().out
    assert "MetisPartitioner(balance='train'" in said and "\nSuperNodePartitioner()\n" in said
    assert said.count("RAM for a part: ") == said.count("2 parts: ") == 3
    assert said.count("of label skew beyond chance") == 3
    assert len(list((Path(graph) / "partitions").iterdir())) == 3  # where a fit will find them


def test_what_cannot_be_done_is_said(graph: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a saved graph"):
        main(["inspect", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"num_parts \(3000\) must not exceed the graph's nodes"):
        main(["inspect", graph, "--parts", "3000"])


def test_all_files_are_compared_with_what_was_saved(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Graph.open(graph)
    save_shards(whole, RandomPartitioner()(whole, 2, 0), tmp_path / "shares")
    split_edges(whole, negatives=2).save(tmp_path / "links")
    for path in (graph, str(tmp_path / "shares"), str(tmp_path / "links")):
        main(["inspect", "--check", path])
        assert "all arrays are what was saved" in capsys.readouterr().out
    for path in (graph, f"{tmp_path}/shares", f"{tmp_path}/links"):
        x = next(Path(path).rglob("x.npy"))
        content = x.read_bytes()
        x.unlink()
        x.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(SystemExit, match=r"x\.npy is not the file that was saved"):
            main(["inspect", "--check", path])
