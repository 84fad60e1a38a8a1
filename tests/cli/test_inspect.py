"""`inspect` as a command."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from lightning_gnn_dist import (
    Graph,
    NeighborSampler,
    RandomPartitioner,
    citations,
    communities,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.prepare.reorder import reorder_graph


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
    assert "RAM for a part: " in said and 'boundary="auto" is Halo(2)' in said
    assert "   Halo(1)  " in said and "Exchange()" in said and "History()" in said and "seed_hops" not in said
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


def test_what_a_cache_saves(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a pass is one batch, and a bulk of four needs nearly all of the 2,000 rows of 64 float32."""
    sizes = ["--batch-size", "1000", "--fanout", "15", "10"]
    main(["inspect", graph, "--cache", "0.0001", "1", *sizes])
    title, without, small, large = capsys.readouterr().out.splitlines()[-4:]
    assert title.startswith("Rows that a pass would fetch from its files, one process, with batches of 1000 and fan-o")
    assert "(512 batches drawn, 1 in a pass)" in title
    rows = int(without.split()[3].replace(",", ""))
    assert 490 < rows <= 500 and without.startswith(f"  without a cache: {rows} rows, 12")  # kB
    assert small.startswith("  cache of 100.0 kB: holds 20% of them, ")  # 390 rows
    assert large.startswith("  cache of 1.0 GB: holds 99% of them, ")
    main(["inspect", graph, "--parts", "2", "--partitioner", "random", "--cache", "1", *sizes])
    assert "from other shards, part " in capsys.readouterr().out


def test_what_a_cache_saves_of_a_graph_with_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a bulk needs nearly all of 600 rows of 128 bytes, 300 of 64 and 150 of 32, behind headers of 128 bytes.

    These are 19, 5 and 2 blocks of a disk. With room for all rows, all but those of the first bulk are held.
    """
    citations(600).save(tmp_path / "typed")
    sizes = ["--batch-size", "90", "--fanout", "15", "10"]
    main(["inspect", str(tmp_path / "typed"), "--cache", "0.00005", "1", *sizes])
    without, small, large = capsys.readouterr().out.splitlines()[-3:]
    rows = int(without.split()[3].replace(",", ""))
    assert 900 < rows <= 1050 and without.endswith(" rows, 106.5 kB") and "cache of 50.0 kB: holds 4" in small
    assert "cache of 1.0 GB: holds 99% of them, " in large
    main(["inspect", str(tmp_path / "typed"), "--parts", "2", "--partitioner", "random", "--cache", "1", *sizes])
    assert "from other shards, part " in capsys.readouterr().out


def test_what_lies_on_a_device(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a row has 256 bytes, and edges, labels and masks come before rows."""
    whole = Graph.open(Path(graph))
    edges = whole.num_bytes - 2000 * 256
    sizes = [1000, edges + 500 * 256, 10**9]
    main(["inspect", graph, "--batch-size", "100", "--device", *(str(size / 1e9) for size in sizes)])
    title, small, some, all_of_it = capsys.readouterr().out.splitlines()[-4:]
    assert title == "On a GPU, of one process, with batches of 100 and fan-out 15, 10 (128 drawn):"
    narrow = f"edges and narrow arrays ({edges / 1e6:.2f} MB)"
    assert small.startswith(f"  1.0 kB: 3 of 2,000 rows of features (0.00 MB) lie there, and {narrow} in RAM; training")
    assert f"{narrow} and 500 of 2,000 rows of features (0.13 MB) lie there; training batches find " in some
    share = float(some.split("% of their rows")[0].split()[-1]) / 100
    brought = float(some.split(" MB a batch")[0].split()[-1])
    assert 0.25 < share < 0.6 and brought == pytest.approx((1 - share) * 256 * rows_of_a_batch(whole) / 1e6, rel=0.1)
    assert all_of_it.endswith(f"{narrow} and all rows of features (0.51 MB) lie there")
    citations(600).save(tmp_path / "typed")
    main(["inspect", str(tmp_path / "typed"), "--device", "0.00005"])
    assert " of 1,050 rows of features (0.05 MB) lie there" in capsys.readouterr().out  # venues have none


def rows_of_a_batch(graph: Graph) -> float:
    seeds = graph.split("train").split(100)[:2]
    samples = NeighborSampler([15, 10]).sample_bulk(graph, seeds, [BatchKey(0, 0, i) for i in range(2)])
    return sum(len(sample.nodes) for sample in samples) / 2


def test_what_has_no_rows_to_hold_is_said(tmp_path: Path) -> None:
    whole = communities(200)
    masks = {name: array for name, array in whole.node_arrays.items() if name != "x"}
    Graph(whole.indptr, whole.indices, masks).save(tmp_path / "narrow")
    with pytest.raises(SystemExit, match="has no features that --cache could hold, of at least 32 bytes a node"):
        main(["inspect", str(tmp_path / "narrow"), "--cache", "1"])
    Graph(whole.indptr, whole.indices, {"x": whole.node_arrays["x"]}).save(tmp_path / "bare")
    with pytest.raises(SystemExit, match="train"):
        main(["inspect", str(tmp_path / "bare"), "--cache", "1"])
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "bare"), "--cache", "0"])


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


def test_the_cost_of_some_nodes(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Graph.open(graph)
    senders = [set(opened.indices[a:b].tolist()) for a, b in itertools.pairwise(opened.indptr.tolist())]
    asked, degrees = {3, 14, 1999}, opened.degrees()
    inner = asked.union(*(senders[node] for node in asked))
    outer = inner.union(*(senders[node] for node in inner))
    (tmp_path / "ids.txt").write_text("3\n14\n1999\n")
    main(["inspect", graph, "--nodes", str(tmp_path / "ids.txt"), "--layers", "2"])
    said = capsys.readouterr().out
    rows = [line.replace(",", "").split() for line in said.splitlines() if re.match(r"^ +[12]  ", line)]
    assert [row[1] for row in rows] == [str(len(inner)), "3"]
    assert [row[3] for row in rows] == [str(int(degrees[sorted(nodes)].sum())) for nodes in (inner, asked)]
    assert rows[0][2] == f"{len(inner) / 2000:.1%}" and rows[0][4] == f"{int(rows[0][3]) / opened.num_edges:.1%}"
    assert f"They reach {len(outer):,} nodes, {len(outer) / 2000:.1%} of all." in said
    assert re.search(r"About [\d.e-]+ s on one core, [\d.]+% of the [\d.e-]+ s of a pass", said)
    main(["inspect", graph, "--nodes", "5,77,3", "--layers", "9"])
    assert "so they cost nearly a pass over all: write the rows of all nodes once" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--nodes must lie in \[0, 2000\), got 2000"):
        main(["inspect", graph, "--nodes", "2000"])


def test_what_a_sweep_costs(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 2,000 nodes in eight chunks, of which two and those that are read take 2 / 8 of all bytes twice."""
    whole = Graph.open(graph)
    with pytest.raises(SystemExit, match=r"is not: write one with lightning-gnn-dist reorder"):
        main(["inspect", graph, "--sweep", "1"])
    reorder_graph(whole, RandomPartitioner()(whole, 8, 0), tmp_path / "chunks")
    whole = Graph.open(tmp_path / "chunks")
    allowed = (whole.num_bytes + 22 * 2000) / 8 * 4 + 8
    main(["inspect", str(tmp_path / "chunks"), "--sweep", str(allowed / 1e9), "--batch-size", "5"])
    said = capsys.readouterr().out
    assert "A sweep of Sweep(chunks=2, of=8), a rank on each host, by what was measured here: " in said
    rate, unit, step = re.search(r"here: ([\d.]+) (\w)B of chunks a second, and (\d+) ms a step", said).groups()
    one, two, four = [line.split() for line in said.splitlines() if re.match(r" +\d+ +\d+ +", line)]
    mega = whole.num_bytes / 1e6
    assert one[:4] == ["1", "4", f"{mega * 1e3:.1f}", "kB"] and two[:2] == ["2", "2"]
    assert four[:3] == ["4", "1", "nothing"]
    assert float(one[4]) == pytest.approx(4 * 10 * int(step) / 1e3, abs=0.1)  # 200 seeds, 50 a turn, 5 a batch
    assert float(one[6]) == pytest.approx(mega / (float(rate) * {"M": 1, "G": 1e3}[unit]), abs=0.1)
    assert "with 4 hosts chunks stay in memory, and nothing is read" in said
    assert f"a TB is read in {1e12 / whole.num_bytes:,.0f} sweeps" in said
    with pytest.raises(SystemExit, match=r"--layers 3 needs a --fanout of as many numbers, got \[15, 10\]"):
        main(["inspect", str(tmp_path / "chunks"), "--sweep", "1", "--layers", "3"])
