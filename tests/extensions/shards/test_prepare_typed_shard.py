"""A shard made of typed tables is that of the whole graph, divided, also after kills; bad input is refused."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, Partition, prepare_graph, save_shards
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.graph import rows as rows_module
from tests.graph.typed.graphs import save_arrays, small
from tests.prepare.kills import until_it_is_there

PARTS, COUNTS = 3, {"author": 7, "paper": 12, "venue": 3}  # in the order of the files


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


def partition_of(by: str) -> Partition:
    """Consecutive nodes of each type, or parts of which one has none of a type."""
    generator = np.random.default_rng(5)
    if by == "ranges":
        owners = [np.sort(np.arange(count) % PARTS) for count in COUNTS.values()]
    else:
        owners = [generator.integers(0, PARTS - (kind == "venue"), count) for kind, count in COUNTS.items()]
    return Partition(torch.from_numpy(np.concatenate(owners).astype(np.int32)), PARTS)


def assignment_of(by: str, folder: Path) -> Path | None:
    if by == "ranges":
        return None
    folder.mkdir()
    for kind, owners in zip(COUNTS, partition_of(by).assignment.split(list(COUNTS.values())), strict=True):
        np.save(folder / f"{kind}.npy", owners.numpy())
    return folder


def divided(source: Path, folder: Path, by: str, time: str | None, **options: Any) -> Path:
    """The shards by way of the whole graph."""
    prepare_graph(source, folder.parent / "whole", time=time, **options)
    save_shards(Graph.open(folder.parent / "whole"), partition_of(by), folder)
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
    assert {key: ours[key] for key in ("nodes", "edges", "types")} == {
        key: theirs[key] for key in ("nodes", "edges", "types")
    }


@pytest.mark.parametrize(
    ("by", "time", "reverse", "memory_bytes"),
    [
        ("ranges", "time", False, 2_000_000_000),
        ("parts", "time", True, 1_500),
        pytest.param("parts", None, False, 2_000_000_000, marks=pytest.mark.slow),
        pytest.param("ranges", None, True, 1_500, marks=pytest.mark.slow),
    ],
)
def test_of_arrays_it_is_the_shard_of_the_divided_graph(
    arrays: Path,
    tmp_path: Path,
    by: str,
    time: str | None,
    reverse: bool,
    memory_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", 5)
    expected = divided(arrays, tmp_path / "expected", by, time, reverse=reverse)
    assignment = assignment_of(by, tmp_path / "parts")
    settings: dict[str, Any] = {"time": time, "reverse": reverse, "memory_bytes": memory_bytes}
    for index in (2, 0, 1):
        host = tmp_path / f"host{index}"
        prepare_graph(arrays, host, shard=OneShard(index, PARTS, assignment), **settings)
        check_equal(host, expected, index)
        assert Shard.open(host, index).rows.num_edges
        assert sorted(path.name for path in host.iterdir()) == [f"share-0000{index}", "shares.json"]
    assert len({(tmp_path / f"host{index}" / "shares.json").read_text() for index in range(PARTS)}) == 1


@pytest.mark.parametrize(
    ("by", "time", "memory_bytes"),
    [
        ("parts", "year", 3_000),
        pytest.param("ranges", "year", 2_000_000_000, marks=pytest.mark.slow),
        pytest.param("parts", None, 2_000_000_000, marks=pytest.mark.slow),
        pytest.param("ranges", None, 3_000, marks=pytest.mark.slow),
    ],
)
def test_of_tables_it_is_the_shard_of_the_divided_graph(
    tables: Path, tmp_path: Path, by: str, time: str | None, memory_bytes: int
) -> None:
    expected = divided(tables, tmp_path / "expected", by, time, reverse=True)
    assignment = assignment_of(by, tmp_path / "parts")
    for index in range(PARTS):
        own = OneShard(index, PARTS, assignment)
        prepare_graph(tables, tmp_path / "found", shard=own, time=time, reverse=True, memory_bytes=memory_bytes)
        check_equal(tmp_path / "found", expected, index)


def test_the_shards_are_these(tmp_path: Path) -> None:
    """By hand: users 0, 1 | 2 and films 0 | 1, and who saw what."""
    files = {
        "nodes/user.csv": "id,age\nu,1\nv,2\nw,3\n",
        "nodes/film.csv": "id,y\n7,0\n5,1\n",
        "edges/user__saw__film.csv": "user,film,stars\nw,5,3\nu,7,5\nw,7,4\nv,5,1\n",
    }
    for name, text in files.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    for index in range(2):
        prepare_graph(tmp_path / "source", tmp_path / "shards", shard=OneShard(index, 2), reverse=True)
    first, second = (Shard.open(tmp_path / "shards", index).rows for index in range(2))
    assert second.types is not None
    assert first.types.node_types == ("film", "user") and first.types.sender_offsets == (0, 2, 5)
    assert first.indptr.tolist() == [0, 2, 3, 4] and first.indices.tolist() == [2, 4, 0, 1]
    assert second.indptr.tolist() == [0, 2, 4] and second.indices.tolist() == [3, 4, 0, 1]
    assert second.types.edge_type.tolist() == [0, 0, 1, 1]
    stars = ("user", "saw", "film"), ("film", "rev_saw", "user")
    assert [second.types.edge_arrays[kind]["edge_stars"].tolist() for kind in stars] == [[1, 3], [4, 3]]
    assert second.types.node_arrays["user"]["x"].tolist() == [[3]]
    assert second.types.node_arrays["user"]["n_id"].tolist() == [2]
    assert second.types.node_arrays["film"]["y"].tolist() == [1]


def test_a_split_is_the_same_on_all_hosts(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (tables / "nodes" / "paper.csv").read_text().replace("split", "kind of split")
    (tables / "nodes" / "paper.csv").write_text(text)
    options = ["--split", "0.5", "0.25", "0.25", "--seed", "4", "--drop", "kind of split", "--time", "year"]
    for index in range(PARTS):
        command = ["prepare", str(tables), str(tmp_path / "shards"), "--shard", str(index), "--num-shards", str(PARTS)]
        main([*command, *options])
    assert "paper train" in capsys.readouterr().out
    given: dict[str, Any] = {"drop": ["kind of split"], "split": (0.5, 0.25, 0.25), "seed": 4}
    divided(tables, tmp_path / "expected", "ranges", "year", **given)
    for index in range(PARTS):
        check_equal(tmp_path / "shards", tmp_path / "expected", index)


@pytest.mark.parametrize("kind", ["arrays", "tables"])
def test_it_goes_on_after_any_kill(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"time": "time" if kind == "arrays" else "year", "reverse": True, "memory_bytes": 3_000}
    host, own = tmp_path / "host", OneShard(1, PARTS)
    until_it_is_there(
        host / "share-00001",
        5,
        lambda on_progress: prepare_graph(source, host, shard=own, **settings, on_progress=on_progress),
    )
    expected = divided(source, tmp_path / "expected", "ranges", settings["time"], reverse=True)
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
        prepare_graph(tables, tmp_path / "host", shard=OneShard(0, PARTS, file if name == "all.npy" else assignment))
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
        prepare_graph(source, tmp_path / f"first{count}", shard=OneShard(0, 4), memory_bytes=500_000)  # compiles
        tracemalloc.start()
        prepare_graph(source, tmp_path / f"host{count}", shard=OneShard(1, 4), memory_bytes=500_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 6_000_000  # 4.6 MB were found, and nearly as many with a sixth of the edges
    assert peaks[1] < 1.5 * peaks[0]


def test_shards_count_from_0() -> None:
    with pytest.raises(ValueError, match=r"index must be below 2, the number of shards, got 2: they count from 0\."):
        OneShard(2, 2)
