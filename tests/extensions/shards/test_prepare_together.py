"""Ranks that share the reading of files make the shards, to the byte, that hosts make which read all of them."""

import contextlib
import io
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_gnn_dist import Graph, MetisPartitioner, RandomPartitioner, StreamingPartitioner, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.npy import NpyFile
from tests.graph.typed.graphs import save_arrays, small
from tests.ranks import join, run_ranks, start_ranks

NUM_NODES, NUM_EDGES = 211, 3000
Settings = dict[str, Any]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files of edges of very unequal sizes, one of them a text, and arrays of nodes in one file and in several."""
    folder, generator = tmp_path / "source", np.random.default_rng(0)
    for name in ("edge_index", "x"):
        (folder / name).mkdir(parents=True)
    edges = generator.integers(0, NUM_NODES, (2, NUM_EDGES))
    edges[:, ::3] %= 5  # rows of very unequal length
    for number, piece in enumerate(np.split(edges, [7, 7, 2400], 1)):
        np.save(folder / "edge_index" / f"{number}.npy", piece if number % 2 else piece.T.astype(np.int32))
    np.savetxt(folder / "edge_index" / "4.csv", generator.integers(0, NUM_NODES, (100, 2)), "%d", ",", header="a,b")
    features = generator.normal(size=(NUM_NODES, 7)).astype(np.float16)
    for number, rows in enumerate(np.split(features, [3, 150])):
        np.save(folder / "x" / f"{number}.npy", rows)
    np.save(folder / "y.npy", generator.integers(0, 5, NUM_NODES))
    np.save(folder / "train_idx.npy", np.arange(0, NUM_NODES, 3))
    np.save(tmp_path / "parts2.npy", generator.integers(0, 2, NUM_NODES))
    np.save(tmp_path / "parts4.npy", np.minimum(generator.integers(0, 9, NUM_NODES), 3))
    return folder


def parts_of(source: Path, num_ranks: int) -> Path:
    return source.parent / f"parts{num_ranks}.npy"


def ways(source: Path, num_ranks: int) -> list[tuple[Path | None, Settings]]:
    by_hand = parts_of(source, num_ranks) if num_ranks > 1 else None
    return [(None, {"undirected": True}), (by_hand, {"split": None, "memory_bytes": 12_000, "float_labels": False})]


def together(rank: int, world_size: int, source: Path) -> Counter[str]:
    """Prepare; return the bytes that were read of each file of the source."""
    join(rank, world_size)
    found, read = Counter[str](), NpyFile.read

    def counted(file: NpyFile, first: int, count: int) -> Any:
        if file.path.is_relative_to(source):
            found[str(file.path.relative_to(source))] += count * file.dtype.itemsize
        return read(file, first, count)

    NpyFile.read = counted  # type: ignore[method-assign]
    for number, (assignment, settings) in enumerate(ways(source, world_size)):
        own = OneShard(rank, world_size, assignment, together=True)
        prepare_graph(source, source.parent / f"together{number}", shard=own, **settings)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_are_those_of_hosts_that_read_all(source: Path, tmp_path: Path, num_ranks: int) -> None:
    of_ranks = run_ranks(together, num_ranks, source)
    for number, (assignment, settings) in enumerate(ways(source, num_ranks)):
        for index in range(num_ranks):
            prepare_graph(source, tmp_path / f"{number}", shard=OneShard(index, num_ranks, assignment), **settings)
        assert contents(tmp_path / f"together{number}") == contents(tmp_path / f"{number}")
    sizes = {file: NpyFile.of(file).num_bytes for file in source.rglob("*.npy")}
    expected = {str(file.relative_to(source)): len(ways(source, num_ranks)) * size for file, size in sizes.items()}
    assert sum(of_ranks, Counter()) == {name: size for name, size in expected.items() if size}  # each is read once


def typed(rank: int, world_size: int, source: Path, assignment: Path | None) -> None:
    join(rank, world_size)
    own = OneShard(rank, world_size, assignment, together=True)
    prepare_graph(source, source.parent / "out", shard=own, time="time", reverse=True, memory_bytes=20_000)


def test_types_and_what_edges_carry_are_dealt_too(tmp_path: Path) -> None:
    """Also edges of a type in one text, of which two ranks read nothing, and equal edges that carry other numbers."""
    source, assignment, generator = tmp_path / "source", tmp_path / "parts", np.random.default_rng(3)
    data = small()
    save_arrays(data, source)
    assignment.mkdir()
    for kind in data.node_types:
        np.save(assignment / f"{kind}.npy", generator.integers(0, 3, data[kind].num_nodes))
    rows = [f"{paper},{other},{weight / 8}" for weight, (paper, other) in enumerate(generator.integers(0, 5, (90, 2)))]
    text = source / "edges" / "paper__like__paper.csv"
    text.write_text("old,new,weight\n" + "\n".join(rows) + "\n")
    run_ranks(typed, 3, source, assignment)
    for index in range(3):
        own = OneShard(index, 3, assignment)
        prepare_graph(source, tmp_path / "expected", shard=own, time="time", reverse=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def killed(rank: int, world_size: int, source: Path, at: str) -> str:
    """Rank 1 is killed at a stage; return the error of the others."""
    join(rank, world_size)

    def on_progress(stage: str, share: float) -> None:
        if rank == 1 and stage == at:
            os.kill(os.getpid(), signal.SIGKILL)

    replace = store.replace

    def renaming(*paths: Path) -> None:
        on_progress("renaming", 0.0)
        replace(*paths)

    store.replace = renaming
    try:
        own = OneShard(rank, world_size, together=True)
        prepare_graph(source, source.parent / "out", shard=own, memory_bytes=12_000, on_progress=on_progress)
    except RuntimeError as error:
        return str(error)
    return ""


def test_they_go_on_after_one_of_them_was_killed(source: Path, tmp_path: Path) -> None:
    """Also where the others have renamed theirs already."""
    for at in ("copying arrays", "reading edges", "sorting edges", "renaming"):
        with start_ranks(killed, 2, source, at) as ranks:
            others, _ = ranks.results(may_die={1})
        assert bool(others) == (at != "renaming")
    assert [(tmp_path / "out" / f"share-0000{index}").exists() for index in (0, 1)] == [True, False]
    assert run_ranks(killed, 2, source, "") == ["", ""]
    for index in (0, 1):
        prepare_graph(source, tmp_path / "expected", shard=OneShard(index, 2))
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def refused(rank: int, world_size: int, source: Path) -> list[str]:
    """Ranks with other settings; a bad edge and a bad feature in the share of one; a shard that is there."""
    join(rank, world_size)
    found, out = list[str](), source.parent / "out"
    own = OneShard(rank, world_size, together=True)
    files = [source / "x" / "2.npy", source / "edge_index" / "0.npy"]
    good = np.load(files[0])
    for wrong, rows in ((None, good), (files[0], np.full_like(good, np.nan)), (files[1], np.array([[0, NUM_NODES]]))):
        if rank == 0 and wrong is not None:
            np.save(files[0], good)
            np.save(wrong, rows)
        dist.barrier()
        with pytest.raises(ValueError, match=r"\w") as error:
            prepare_graph(source, out, shard=own, undirected=wrong is None and rank == 1)
        found.append(str(error.value))
    (out / f"share-0000{rank}").mkdir(parents=True)
    with pytest.raises(FileExistsError) as there:
        prepare_graph(source, out, shard=own)
    return [*found, str(there.value)]


def test_what_one_rank_refuses_all_refuse(source: Path, tmp_path: Path) -> None:
    said = r"Ranks \[1\] were given other files or settings", "x holds NaN", r"names the receiver 211, but there are"
    for found in run_ranks(refused, 2, source):
        assert all(re.search(pattern, each) for pattern, each in zip((*said, "exists already"), found, strict=True))
    with pytest.raises(ValueError, match=r"this process is rank 0 of 1: start a rank for each shard with torchrun"):
        OneShard(0, 2, together=True)
    table = tmp_path / "nodes.csv"
    table.write_text("id,label\n" + "".join(f"{node},0\n" for node in range(NUM_NODES)))
    with pytest.raises(ValueError, match="is a table of nodes, and ranks that read the files together take arrays"):
        prepare_graph(source / "edge_index", tmp_path / "out", nodes=table, shard=OneShard(0, 1, together=True))


def commanded(rank: int, world_size: int, source: Path) -> str:
    """As torchrun starts the command."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
    given = ["prepare", str(source), str(source.parent / "out")]
    with pytest.raises(SystemExit, match="make the shards of their numbers: leave --shard and --num-shards out"):
        main([*given, "--shard", "0", "--num-shards", "2"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([*given, "--assignment", str(parts_of(source, world_size)), "--undirected"])
    return said.getvalue()


def test_the_command_is_started_by_torchrun(source: Path, tmp_path: Path) -> None:
    said = run_ranks(commanded, 2, source)
    for index in (0, 1):
        own = OneShard(index, 2, parts_of(source, 2))
        prepare_graph(source, tmp_path / "expected", shard=own, undirected=True)
        assert f"out/share-0000{index}: " in said[index] and ("will take at most" in said[index]) == (index == 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def cut(rank: int, world_size: int, source: Path, at: str) -> None:
    """Rank 1 is killed at a stage."""
    join(rank, world_size)

    def on_progress(stage: str, share: float) -> None:
        if rank == 1 and stage == at:
            os.kill(os.getpid(), signal.SIGKILL)

    for name, partitioner in (("random", RandomPartitioner()), ("stream", StreamingPartitioner(passes=2))):
        own, out = OneShard(rank, world_size, partitioner, together=True), source.parent / name
        with contextlib.suppress(RuntimeError, FileExistsError):
            prepare_graph(source, out, shard=own, undirected=True, memory_bytes=12_000, on_progress=on_progress)


@pytest.mark.slow
def test_ranks_cut_as_one_host_does_that_has_the_graph(source: Path, tmp_path: Path) -> None:
    prepare_graph(source, tmp_path / "whole", undirected=True)
    graph = Graph.open(tmp_path / "whole")
    for at in ("cutting", ""):
        with start_ranks(cut, 3, source, at) as ranks:
            ranks.results(may_die={1})
    for name, partitioner in (("random", RandomPartitioner()), ("stream", StreamingPartitioner(passes=2))):
        np.save(tmp_path / f"{name}.npy", partitioner(graph, 3, seed=0).assignment.numpy())
        for index in range(3):
            own = OneShard(index, 3, tmp_path / f"{name}.npy")
            prepare_graph(source, tmp_path / f"{name} expected", shard=own, undirected=True)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} expected")


def test_partitioners_that_need_the_whole_graph_are_refused(source: Path, tmp_path: Path) -> None:
    for partitioner in (MetisPartitioner(), StreamingPartitioner(order="random")):
        with pytest.raises(ValueError, match="needs the whole graph, which no rank has: use RandomPartitioner"):
            OneShard(0, 1, partitioner, together=True)
    with pytest.raises(ValueError, match=r"cuts what ranks read together, .*: give together=True"):
        OneShard(0, 1, RandomPartitioner())
    save_arrays(small(), tmp_path / "typed")
    own = OneShard(0, 1, RandomPartitioner(), together=True)
    with pytest.raises(ValueError, match="cuts graphs without types here: give a folder with the shard of each node"):
        prepare_graph(tmp_path / "typed", tmp_path / "out", shard=own)
    with pytest.raises(SystemExit, match="--partitioner cuts what ranks of torchrun read: leave it out, or"):
        main(["prepare", str(source), str(tmp_path / "out"), "--partitioner", "random"])
