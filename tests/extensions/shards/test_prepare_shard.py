"""A shard made on its own host is the one that dividing the whole graph gives; kills and wrong files leave none."""

import json
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.graph import rows as rows_module
from tests.data_fitting import trainer
from tests.every_strategy import plain_ddp
from tests.graph.typed.graphs import save_arrays, small
from tests.prepare.kills import until_it_is_there
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.slow import slow

NUM_NODES, NUM_EDGES, PARTS = 300, 5000, 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "edge_index").mkdir(parents=True)
    generator = np.random.default_rng(0)
    edges = generator.integers(0, NUM_NODES, (2, NUM_EDGES))
    for number, piece in enumerate(np.array_split(edges, 4, 1)):
        np.save(folder / "edge_index" / f"{number}.npy", piece)
    np.save(folder / "x.npy", generator.normal(size=(NUM_NODES, 7)).astype(np.float16))
    np.save(folder / "y.npy", generator.integers(0, 5, NUM_NODES))
    np.save(folder / "train_idx.npy", np.arange(0, NUM_NODES, 3))
    np.save(folder.parent / "parts.npy", generator.integers(0, PARTS, NUM_NODES))
    return folder


def check_equal(found: Path, expected: Path, index: int) -> None:
    """All files of a shard are the same, to the byte, and the index but for who made it."""
    shards = [folder / f"share-0000{index}" for folder in (found, expected)]
    names = [{str(file.relative_to(shard)) for file in shard.rglob("*.npy")} for shard in shards]
    assert names[0] == names[1]
    for name in names[0]:
        assert (shards[0] / name).read_bytes() == (shards[1] / name).read_bytes(), name
    described = [json.loads((shard / "meta.json").read_text()) for shard in shards]
    assert described[0] == described[1]
    ours, theirs = (json.loads((path / "shares.json").read_text()) for path in (found, expected))
    told = {"nodes", "edges", "types"} & ours.keys()  # of a graph without types a host knows its own edges alone
    assert "nodes" in told and all(ours[key] == theirs[key] for key in told)


def check_hosts(source: Path, folder: Path, expected: Path, assignment: Path | None, **settings: Any) -> None:
    """What each host makes, whichever is first, is its shard of the whole graph, and has the same index."""
    for index in (2, 0, 1):
        host = folder / f"host{index}"
        lgd.prepare_graph(source, host, shard=OneShard(index, PARTS, assignment), **settings)
        check_equal(host, expected, index)
        assert Shard.open(host, index).rows.num_edges
        assert sorted(path.name for path in host.iterdir()) == [f"share-0000{index}", "shares.json"]
    assert len({(folder / f"host{index}" / "shares.json").read_text() for index in range(PARTS)}) == 1


def divided(source: Path, folder: Path, owners: np.ndarray[Any, Any], **settings: Any) -> Path:
    """The shards by way of the whole graph."""
    lgd.prepare_graph(source, folder.parent / "whole", **settings)
    partition = lgd.Partition(torch.from_numpy(owners.astype(np.int32)), PARTS)
    lgd.save_shards(lgd.Graph.open(folder.parent / "whole"), partition, folder)
    return folder


@pytest.mark.parametrize("memory_bytes", [20_000, 10**9])
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("by", ["ranges", "parts"])
def test_it_is_the_shard_of_the_divided_graph(
    source: Path, tmp_path: Path, by: str, undirected: bool, memory_bytes: int
) -> None:
    file = tmp_path / "parts.npy" if by == "parts" else None
    owners = np.arange(NUM_NODES) // (NUM_NODES // PARTS) if file is None else np.load(file)
    expected = divided(source, tmp_path / "expected", owners, undirected=undirected)
    check_hosts(source, tmp_path, expected, file, undirected=undirected, memory_bytes=memory_bytes)


def test_shards_of_other_files_do_not_join(source: Path, tmp_path: Path) -> None:
    lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    with pytest.raises(ValueError, match=r"describes 3 shards that are not these 2"):
        lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(1, 2))
    (source / "edge_index" / "3.npy").unlink()  # this host lacks a file that the others have
    with pytest.raises(ValueError, match="shards of other edges, labels or settings"):
        lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS))
    assert not (tmp_path / "host" / "share-00001").exists()


def connect(rank: int, world_size: int, folder: str) -> None:
    data = lgd.PartitionedDataModule(f"{folder}/host{rank}", batch_size=8, boundary=lgd.Fetch())
    trainer(world_size, plain_ddp()).fit(SAGE(7, 5), data)


def test_ranks_are_told_whose_shard_is_of_another_graph(source: Path, tmp_path: Path) -> None:
    lgd.prepare_graph(source, tmp_path / "host0", shard=OneShard(0, 2))
    np.save(source / "train_idx.npy", np.arange(7))
    lgd.prepare_graph(source, tmp_path / "host1", shard=OneShard(1, 2))
    with pytest.raises(RankError, match=r"The shards of ranks \[1\] are not of the graph of rank 0"):
        run_ranks(connect, 2, str(tmp_path))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (np.full(NUM_NODES, PARTS), r"names parts beyond the 3 shards that there are"),
        (np.zeros(NUM_NODES - 1, np.int64), "the part of each of 300 nodes is needed"),
        (np.zeros(NUM_NODES), "holds float64"),
        (np.zeros(NUM_NODES, np.int64), "No node belongs to shard 1 of 3"),
    ],
)
def test_a_wrong_assignment_is_refused(source: Path, tmp_path: Path, parts: Any, complaint: str) -> None:
    np.save(tmp_path / "wrong.npy", parts)
    with pytest.raises(ValueError, match=complaint):
        lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS, assignment=tmp_path / "wrong.npy"))


def test_what_edges_carry_is_refused(source: Path, tmp_path: Path) -> None:
    np.save(source / "edge_weight.npy", np.ones(NUM_EDGES, np.float32))
    with pytest.raises(ValueError, match=r"edge_weight belongs to edges.*--drop edge_weight"):
        lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    lgd.prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS), drop=["edge_weight"])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_ranks_of_torchrun_make_the_shards_of_their_numbers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(PARTS))
    given = ["prepare", str(source), str(tmp_path / "out"), "--assignment", str(tmp_path / "parts.npy"), "--undirected"]
    for rank in (0, 1, 2, 1):  # the last after another rank was killed, and all are started again
        monkeypatch.setenv("RANK", str(rank))
        main(given)
    assert "share-00001 is there. To make it anew, add --overwrite" in capsys.readouterr().out
    for index in range(PARTS):
        own = OneShard(index, PARTS, tmp_path / "parts.npy")
        lgd.prepare_graph(source, tmp_path / "expected", shard=own, undirected=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    with pytest.raises(SystemExit, match="make the shards of their numbers: leave --shard and --num-shards out"):
        main([*given, "--shard", "0", "--num-shards", "3"])


# Shards of typed graphs, in arrays and in tables.


COUNTS = {"author": 7, "paper": 12, "venue": 3}  # in the order of the files


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """The small graph in arrays; the edges of one type, and the nodes of another, as tables."""
    save_arrays(small(), tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Text and Parquet with ids of all kinds, labels in words, splits, times and weights; one type in arrays."""
    generator, folder = np.random.default_rng(0), tmp_path / "source"
    for place in ("nodes", "edges"):
        (folder / place).mkdir(parents=True)
    papers, authors = generator.permutation(900)[:12] + 100, [f"author {chr(97 + i) * (1 + i % 3)}" for i in range(7)]
    splits = ["train", "val", "", "test"]
    rows = [f"{i},{'cab'[n % 3]},{splits[n % 4]},{n % 5}.5,{n * n},{n}" for n, i in enumerate(papers)]
    (folder / "nodes" / "paper.csv").write_text("id,label,split,year,pages,words\n" + "\n".join(rows) + "\n")
    rows = [f"{name}\t{20 + n}\t{n / 8}" for n, name in enumerate(authors)]
    (folder / "nodes" / "author.tsv").write_text("name\tage\tfame\n" + "\n".join(rows) + "\n")
    (folder / "nodes" / "venue").mkdir()
    np.save(folder / "nodes" / "venue" / "num_nodes.npy", np.array(3))
    ends = [(generator.choice(authors), generator.choice(papers)) for _ in range(30)]
    rows = [f"{a},{generator.random():.3f},{p}" for a, p in ends]
    (folder / "edges" / "author__writes__paper.csv").write_text("source,share,target\n" + "\n".join(rows) + "\n")
    rows = [f"{generator.choice(papers)};{generator.choice(papers)};{n % 4};{['no', 'yes'][n % 2]}" for n in range(40)]
    (folder / "edges" / "paper__cites__paper.csv").write_text("old;new;year;label\n" + "\n".join(rows) + "\n")
    (folder / "edges" / "paper__in__venue.csv").write_text(f"paper,venue\n{papers[3]},2\n{papers[8]},0\n")
    return folder


def owners_of(by: str) -> list[np.ndarray[Any, Any]]:
    """Of each type: consecutive nodes, or parts of which one has none of a type."""
    if by == "ranges":
        return [np.sort(np.arange(count) % PARTS) for count in COUNTS.values()]
    generator = np.random.default_rng(5)
    return [generator.integers(0, PARTS - (kind == "venue"), count) for kind, count in COUNTS.items()]


def all_owners(by: str) -> np.ndarray[Any, Any]:
    return np.concatenate(owners_of(by))


def assignment_of(by: str, folder: Path) -> Path | None:
    if by == "ranges":
        return None
    folder.mkdir()
    for kind, owners in zip(COUNTS, owners_of(by), strict=True):
        np.save(folder / f"{kind}.npy", owners)
    return folder


@pytest.mark.parametrize(
    ("kind", "by", "time", "reverse", "memory_bytes"),
    [
        ("arrays", "ranges", "time", False, 2_000_000_000),
        ("arrays", "parts", "time", True, 1_500),
        ("tables", "parts", "year", True, 3_000),
        slow("arrays", "parts", None, False, 2_000_000_000),
        slow("arrays", "ranges", None, True, 1_500),
        slow("tables", "ranges", "year", True, 2_000_000_000),
        slow("tables", "parts", None, True, 2_000_000_000),
        slow("tables", "ranges", None, True, 3_000),
    ],
)
def test_of_types_it_is_the_shard_of_the_divided_graph(
    kind: str,
    by: str,
    time: str | None,
    reverse: bool,
    memory_bytes: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", 5)
    source, assignment = request.getfixturevalue(kind), assignment_of(by, tmp_path / "parts")
    owners = all_owners(by)
    expected = divided(source, tmp_path / "expected", owners, time=time, reverse=reverse)
    check_hosts(source, tmp_path, expected, assignment, time=time, reverse=reverse, memory_bytes=memory_bytes)


def test_a_split_is_the_same_on_all_hosts(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (tables / "nodes" / "paper.csv").read_text().replace("split", "kind of split")
    (tables / "nodes" / "paper.csv").write_text(text)
    options = ["--split", "0.5", "0.25", "0.25", "--seed", "4", "--drop", "kind of split", "--time", "year"]
    for index in range(PARTS):
        command = ["prepare", str(tables), str(tmp_path / "shards"), "--shard", str(index), "--num-shards", str(PARTS)]
        main([*command, *options])
    assert "paper train" in capsys.readouterr().out
    given: dict[str, Any] = {"drop": ["kind of split"], "split": (0.5, 0.25, 0.25), "seed": 4}
    divided(tables, tmp_path / "expected", all_owners("ranges"), time="year", **given)
    for index in range(PARTS):
        check_equal(tmp_path / "shards", tmp_path / "expected", index)


@pytest.mark.parametrize("kind", ["arrays", "tables"])
def test_it_goes_on_after_any_kill(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"time": "time" if kind == "arrays" else "year", "reverse": True, "memory_bytes": 3_000}
    host, own = tmp_path / "host", OneShard(1, PARTS)
    settings |= {"shard": own}
    prepare = partial(lgd.prepare_graph, source, host, **settings)
    until_it_is_there(host / "share-00001", 5, lambda on_progress: prepare(on_progress=on_progress))
    expected = divided(source, tmp_path / "expected", all_owners("ranges"), time=settings["time"], reverse=True)
    check_equal(host, expected, 1)


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("parts/venue.npy", None, r"lacks venue\.npy: give the shard"),
        ("parts/films.npy", [0], r"has films\.npy"),
        ("all.npy", [0] * 22, "must be a folder with one .npy"),
    ],
)
def test_an_assignment_of_other_types_is_refused(
    tables: Path, tmp_path: Path, name: str, parts: list[int] | None, message: str
) -> None:
    assignment, file = assignment_of("parts", tmp_path / "parts"), tmp_path / name
    file.unlink() if parts is None else np.save(file, np.array(parts))
    with pytest.raises(ValueError, match=message):
        lgd.prepare_graph(
            tables, tmp_path / "host", shard=OneShard(0, PARTS, file if name == "all.npy" else assignment)
        )
    assert not (tmp_path / "host").exists()


def test_memory_does_not_grow_with_the_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six times the edges in text and in arrays, the same peak."""
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", 5_000)
    peaks = []
    for count in (30_000, 180_000):
        source, generator = tmp_path / str(count), np.random.default_rng(0)
        for folder in ("nodes/a", "edges/a__to__a"):
            (source / folder).mkdir(parents=True)
        np.save(source / "nodes" / "a" / "num_nodes.npy", np.array(1000))
        np.save(source / "edges" / "a__to__a" / "edge_index.npy", generator.integers(0, 1000, (2, count), np.int32))
        np.save(source / "edges" / "a__to__a" / "edge_attr.npy", generator.random((count, 4), np.float32))
        pairs = generator.integers(0, 1000, (count // 6, 3))
        np.savetxt(source / "edges" / "a__by__a.csv", pairs, "%d", ",", header="a,b,w", comments="")
        lgd.prepare_graph(source, tmp_path / f"first{count}", shard=OneShard(0, 4), memory_bytes=500_000)  # compiles
        tracemalloc.start()
        lgd.prepare_graph(source, tmp_path / f"host{count}", shard=OneShard(1, 4), memory_bytes=500_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 6_000_000  # 4.6 MB were found, and nearly as many with a sixth of the edges
    assert peaks[1] < 1.5 * peaks[0]


def test_shards_count_from_0() -> None:
    with pytest.raises(ValueError, match=r"index must be below 2, the number of shards, got 2: they count from 0\."):
        OneShard(2, 2)


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
