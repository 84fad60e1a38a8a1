"""`inspect` as a command."""

from pathlib import Path

import pytest

from lightning_gnn_dist import (
    Coverage,
    Graph,
    Halo,
    Holding,
    Isolated,
    RandomPartitioner,
    citations,
    communities,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.homes.parts import PartReader


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


def test_parts_of_a_typed_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    citations(600).save(tmp_path / "graph")
    main(["inspect", str(tmp_path / "graph"), "--parts", "2", "--partitioner", "metis"])
    said = capsys.readouterr().out
    assert "RAM for a part: " in said and "with Halo(1), " in said and "seed_hops" not in said
    assert "The parts hold different labels" in said and "GrappaStrategy()" in said
    assert "fan-out" not in said and "NeighborSampler" not in said  # which is one for each edge type


def test_a_split_of_edges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = split_edges(communities(2000))
    split.save(tmp_path / "split")
    main(["inspect", str(tmp_path / "split")])
    held = ", ".join(f"{edges.shape[1]:,} {name}" for name, edges in split.edges.items())
    assert f"held back beside them: {held}\n" in capsys.readouterr().out


def test_several_partitions_with_what_follows(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph, "--parts", "2", "--partitioner", "metis", "random", "supernodes", "--balance", "train"])
    said = capsys.readouterr().out
    assert "MetisPartitioner(balance='train'" in said and "\nSuperNodePartitioner()\n" in said
    assert said.count("RAM for a part: ") == said.count("2 parts: ") == 3
    assert said.count("of label skew beyond chance") == 3
    assert len(list((Path(graph) / "partitions").iterdir())) == 3  # where a fit will find them


def test_memory_is_that_of_parts(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["inspect", graph, "--parts", "3", "--partitioner", "random"])
    said, whole = capsys.readouterr().out, Graph.open(graph)
    partition = RandomPartitioner()(whole, 3, 0)
    for boundary in (Isolated(), Halo(1)):
        readers = [PartReader(whole, partition, Holding(), rank, 3, 0, boundary, Coverage()) for rank in range(3)]
        taken = [reader.read(0).graph.num_bytes for reader in readers]
        assert f"{in_bytes(sum(taken) / 3)} in the mean, {in_bytes(max(taken))} at most" in said
    assert "if batches have 1,024 seeds and draw 15 and 10 neighbours; " in said and " are left here\n" in said


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
