"""A shard made on its own host is the one that dividing the whole graph gives; kills and wrong files leave none."""

import contextlib
import io
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Fetch,
    Graph,
    MetisPartitioner,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    StreamingPartitioner,
    prepare_graph,
    save_shards,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.graph.shard import Shard
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.npy import NpyFile
from tests.every_strategy import plain_ddp
from tests.graph.typed.graphs import save_arrays, small
from tests.ranks import RankError, join, run_ranks, start_ranks
from tests.sage import SAGE

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


def divided(source: Path, folder: Path, assignment: np.ndarray[Any, Any], **settings: Any) -> list[Shard]:
    """By way of the whole graph."""
    prepare_graph(source, folder / "whole", **settings)
    partition = Partition(torch.from_numpy(assignment.astype(np.int32)), PARTS)
    save_shards(Graph.open(folder / "whole"), partition, folder / "shares")
    return [Shard.open(folder / "shares", index) for index in range(PARTS)]


def same(one: Graph, other: Graph) -> bool:
    arrays, others = ({"indptr": g.indptr, "indices": g.indices} | g.node_arrays for g in (one, other))
    return arrays.keys() == others.keys() and all(
        array.dtype == others[name].dtype and torch.equal(array, others[name]) for name, array in arrays.items()
    )


@pytest.mark.parametrize("memory_bytes", [20_000, 10**9])
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("by", ["ranges", "parts"])
def test_it_is_the_shard_of_the_divided_graph(
    source: Path, tmp_path: Path, by: str, undirected: bool, memory_bytes: int
) -> None:
    file = tmp_path / "parts.npy"
    assignment = np.load(file) if by == "parts" else np.arange(NUM_NODES) // (NUM_NODES // PARTS)
    expected = divided(source, tmp_path, assignment, undirected=undirected, split=None)
    for index in (2, 0, 1):
        host = tmp_path / f"host{index}"
        own = OneShard(index, PARTS, file if by == "parts" else None)
        prepare_graph(source, host, shard=own, undirected=undirected, memory_bytes=memory_bytes)
        shard = Shard.open(host, index)
        assert same(shard.rows, expected[index].rows)
        assert torch.equal(shard.bounds.nodes, expected[index].bounds.nodes)
        assert shard.rows.fingerprint == expected[index].rows.fingerprint
        assert sorted(path.name for path in host.iterdir()) == [f"share-0000{index}", "shares.json"]
    assert len({(tmp_path / f"host{index}" / "shares.json").read_text() for index in range(PARTS)}) == 1


def test_nodes_may_be_a_table(source: Path, tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    generator = np.random.default_rng(5)
    columns = {"id": np.arange(NUM_NODES), "label": generator.integers(0, 5, NUM_NODES)}
    columns |= {f"f{number}": generator.normal(size=NUM_NODES).astype(np.float32) for number in range(3)}
    table, edges = tmp_path / "nodes.parquet", source / "edge_index"
    parquet.write_table(arrow.table(columns), table, row_group_size=7)
    expected = divided(edges, tmp_path, np.load(tmp_path / "parts.npy"), nodes=table, split=(0.5, 0.25, 0.25))
    for index in range(PARTS):
        given = [str(edges), str(tmp_path / "hosts"), "--nodes", str(table), "--split", "0.5", "0.25", "0.25"]
        given += ["--shard", str(index), "--num-shards", str(PARTS), "--assignment", str(tmp_path / "parts.npy")]
        main(["prepare", *given])
        shard = Shard.open(tmp_path / "hosts", index)
        assert shard.rows.node_arrays["x"].shape[1] == 3 and same(shard.rows, expected[index].rows)
    with pytest.raises(SystemExit, match=r"y\.npy holds no arrays"):
        main(["prepare", *given[:3], str(source / "y.npy"), "--shard", "0", "--num-shards", "2"])


def test_files_of_pyg_and_archives_have_shards_too(source: Path, tmp_path: Path) -> None:
    arrays = {file.stem: np.load(file) for file in source.glob("*.npy")}
    arrays["edge_index"] = np.concatenate([np.load(file) for file in sorted((source / "edge_index").iterdir())], 1)
    np.savez(tmp_path / "data.npz", **arrays)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(Data(num_nodes=NUM_NODES, **tensors), tmp_path / "data.pt")
    for name in ("source", "data.npz", "data.pt"):
        prepare_graph(tmp_path / name, tmp_path / f"host of {name}", shard=OneShard(1, PARTS))
    first, *others = (Shard.open(tmp_path / f"host of {name}", 1) for name in ("source", "data.npz", "data.pt"))
    assert all(same(first.rows, other.rows) and first.bounds.mark == other.bounds.mark for other in others)


def test_shards_of_other_files_do_not_join(source: Path, tmp_path: Path) -> None:
    prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    with pytest.raises(ValueError, match=r"describes 3 shards that are not these 2"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(1, 2))
    (source / "edge_index" / "3.npy").unlink()  # this host lacks a file that the others have
    with pytest.raises(ValueError, match="shards of other edges, labels or settings"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS))
    assert not (tmp_path / "host" / "share-00001").exists()


def connect(rank: int, world_size: int, folder: str) -> None:
    strategy = plain_ddp()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, enable_checkpointing=False, **quiet
    )
    trainer.fit(SAGE(7, 5), PartitionedDataModule(f"{folder}/host{rank}", batch_size=8, boundary=Fetch()))


def test_ranks_are_told_whose_shard_is_of_another_graph(source: Path, tmp_path: Path) -> None:
    prepare_graph(source, tmp_path / "host0", shard=OneShard(0, 2))
    np.save(source / "train_idx.npy", np.arange(7))
    prepare_graph(source, tmp_path / "host1", shard=OneShard(1, 2))
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
def test_a_wrong_assignment_is_refused(
    source: Path, tmp_path: Path, parts: np.ndarray[Any, Any], complaint: str
) -> None:
    np.save(tmp_path / "wrong.npy", parts)
    with pytest.raises(ValueError, match=complaint):
        prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS, assignment=tmp_path / "wrong.npy"))


def test_what_edges_carry_is_refused(source: Path, tmp_path: Path) -> None:
    np.save(source / "edge_weight.npy", np.ones(NUM_EDGES, np.float32))
    with pytest.raises(ValueError, match=r"edge_weight belongs to edges.*--drop edge_weight"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS), drop=["edge_weight"])


# Ranks that share the reading of files make the shards, to the byte, that hosts make which read all of them.


FEW_NODES, FEW_EDGES = 211, 3000
Settings = dict[str, Any]


@pytest.fixture
def unequal_source(tmp_path: Path) -> Path:
    """Files of edges of very unequal sizes, one of them a text, and arrays of nodes in one file and in several."""
    folder, generator = tmp_path / "source", np.random.default_rng(0)
    for name in ("edge_index", "x"):
        (folder / name).mkdir(parents=True)
    edges = generator.integers(0, FEW_NODES, (2, FEW_EDGES))
    edges[:, ::3] %= 5  # rows of very unequal length
    for number, piece in enumerate(np.split(edges, [7, 7, 2400], 1)):
        np.save(folder / "edge_index" / f"{number}.npy", piece if number % 2 else piece.T.astype(np.int32))
    np.savetxt(folder / "edge_index" / "4.csv", generator.integers(0, FEW_NODES, (100, 2)), "%d", ",", header="a,b")
    features = generator.normal(size=(FEW_NODES, 7)).astype(np.float16)
    for number, rows in enumerate(np.split(features, [3, 150])):
        np.save(folder / "x" / f"{number}.npy", rows)
    np.save(folder / "y.npy", generator.integers(0, 5, FEW_NODES))
    np.save(folder / "train_idx.npy", np.arange(0, FEW_NODES, 3))
    np.save(tmp_path / "parts2.npy", generator.integers(0, 2, FEW_NODES))
    np.save(tmp_path / "parts4.npy", np.minimum(generator.integers(0, 9, FEW_NODES), 3))
    return folder


def parts_of(unequal_source: Path, num_ranks: int) -> Path:
    return unequal_source.parent / f"parts{num_ranks}.npy"


def ways(unequal_source: Path, num_ranks: int) -> list[tuple[Path | None, Settings]]:
    by_hand = parts_of(unequal_source, num_ranks) if num_ranks > 1 else None
    return [(None, {"undirected": True}), (by_hand, {"split": None, "memory_bytes": 12_000, "float_labels": False})]


def together(rank: int, world_size: int, unequal_source: Path) -> Counter[str]:
    """Prepare; return the bytes that were read of each file of the source."""
    join(rank, world_size)
    found, read = Counter[str](), NpyFile.read

    def counted(file: NpyFile, first: int, count: int) -> Any:
        if file.path.is_relative_to(unequal_source):
            found[str(file.path.relative_to(unequal_source))] += count * file.dtype.itemsize
        return read(file, first, count)

    NpyFile.read = counted  # type: ignore[method-assign]
    for number, (assignment, settings) in enumerate(ways(unequal_source, world_size)):
        own = OneShard(rank, world_size, assignment, together=True)
        prepare_graph(unequal_source, unequal_source.parent / f"together{number}", shard=own, **settings)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_are_those_of_hosts_that_read_all(unequal_source: Path, tmp_path: Path, num_ranks: int) -> None:
    of_ranks = run_ranks(together, num_ranks, unequal_source)
    for number, (assignment, settings) in enumerate(ways(unequal_source, num_ranks)):
        for index in range(num_ranks):
            prepare_graph(
                unequal_source, tmp_path / f"{number}", shard=OneShard(index, num_ranks, assignment), **settings
            )
        assert contents(tmp_path / f"together{number}") == contents(tmp_path / f"{number}")
    sizes = {file: NpyFile.of(file).num_bytes for file in unequal_source.rglob("*.npy")}
    expected = {
        str(file.relative_to(unequal_source)): len(ways(unequal_source, num_ranks)) * size
        for file, size in sizes.items()
    }
    assert sum(of_ranks, Counter()) == {name: size for name, size in expected.items() if size}  # each is read once


def typed(rank: int, world_size: int, unequal_source: Path, assignment: Path | None) -> None:
    join(rank, world_size)
    own = OneShard(rank, world_size, assignment, together=True)
    prepare_graph(
        unequal_source, unequal_source.parent / "out", shard=own, time="time", reverse=True, memory_bytes=20_000
    )


def test_types_and_what_edges_carry_are_dealt_too(tmp_path: Path) -> None:
    """Also edges of a type in one text, of which two ranks read nothing, and equal edges that carry other numbers."""
    unequal_source, assignment, generator = tmp_path / "source", tmp_path / "parts", np.random.default_rng(3)
    data = small()
    save_arrays(data, unequal_source)
    assignment.mkdir()
    for kind in data.node_types:
        np.save(assignment / f"{kind}.npy", generator.integers(0, 3, data[kind].num_nodes))
    rows = [f"{paper},{other},{weight / 8}" for weight, (paper, other) in enumerate(generator.integers(0, 5, (90, 2)))]
    text = unequal_source / "edges" / "paper__like__paper.csv"
    text.write_text("old,new,weight\n" + "\n".join(rows) + "\n")
    run_ranks(typed, 3, unequal_source, assignment)
    for index in range(3):
        own = OneShard(index, 3, assignment)
        prepare_graph(unequal_source, tmp_path / "expected", shard=own, time="time", reverse=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def killing(rank: int, at: str) -> Callable[[str, float], None]:
    """Kills rank 1 when it tells of a stage."""

    def on_progress(stage: str, share: float) -> None:
        if rank == 1 and stage == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_progress


def killed(rank: int, world_size: int, unequal_source: Path, at: str) -> str:
    """Rank 1 is killed at a stage; return the error of the others."""
    join(rank, world_size)
    on_progress = killing(rank, at)
    replace = store.replace

    def renaming(*paths: Path) -> None:
        on_progress("renaming", 0.0)
        replace(*paths)

    store.replace = renaming
    try:
        own = OneShard(rank, world_size, together=True)
        prepare_graph(
            unequal_source, unequal_source.parent / "out", shard=own, memory_bytes=12_000, on_progress=on_progress
        )
    except RuntimeError as error:
        return str(error)
    return ""


def test_they_go_on_after_one_of_them_was_killed(unequal_source: Path, tmp_path: Path) -> None:
    """Also where the others have renamed theirs already."""
    for at in ("copying arrays", "reading edges", "sorting edges", "renaming"):
        with start_ranks(killed, 2, unequal_source, at) as ranks:
            others, _ = ranks.results(may_die={1})
        assert bool(others) == (at != "renaming")
    assert [(tmp_path / "out" / f"share-0000{index}").exists() for index in (0, 1)] == [True, False]
    assert run_ranks(killed, 2, unequal_source, "") == ["", ""]
    for index in (0, 1):
        prepare_graph(unequal_source, tmp_path / "expected", shard=OneShard(index, 2))
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def refused(rank: int, world_size: int, unequal_source: Path) -> list[str]:
    """Ranks with other settings; a bad edge and a bad feature in the share of one; a shard that is there."""
    join(rank, world_size)
    found, out = list[str](), unequal_source.parent / "out"
    own = OneShard(rank, world_size, together=True)
    files = [unequal_source / "x" / "2.npy", unequal_source / "edge_index" / "0.npy"]
    good = np.load(files[0])
    for wrong, rows in ((None, good), (files[0], np.full_like(good, np.nan)), (files[1], np.array([[0, FEW_NODES]]))):
        if rank == 0 and wrong is not None:
            np.save(files[0], good)
            np.save(wrong, rows)
        dist.barrier()
        with pytest.raises(ValueError, match=r"\w") as error:
            prepare_graph(unequal_source, out, shard=own, undirected=wrong is None and rank == 1)
        found.append(str(error.value))
    (out / f"share-0000{rank}").mkdir(parents=True)
    with pytest.raises(FileExistsError) as there:
        prepare_graph(unequal_source, out, shard=own)
    return [*found, str(there.value)]


def test_what_one_rank_refuses_all_refuse(unequal_source: Path, tmp_path: Path) -> None:
    said = r"Ranks \[1\] were given other files or settings", "x holds NaN", r"names the receiver 211, but there are"
    for found in run_ranks(refused, 2, unequal_source):
        assert all(re.search(pattern, each) for pattern, each in zip((*said, "exists already"), found, strict=True))
    with pytest.raises(ValueError, match=r"this process is rank 0 of 1: start a rank for each shard with torchrun"):
        OneShard(0, 2, together=True)
    table = tmp_path / "nodes.csv"
    table.write_text("id,label\n" + "".join(f"{node},0\n" for node in range(FEW_NODES)))
    with pytest.raises(ValueError, match="is a table of nodes, and ranks that read the files together take arrays"):
        prepare_graph(unequal_source / "edge_index", tmp_path / "out", nodes=table, shard=OneShard(0, 1, together=True))


def commanded(rank: int, world_size: int, unequal_source: Path) -> str:
    """As torchrun starts the command."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
    given = ["prepare", str(unequal_source), str(unequal_source.parent / "out")]
    with pytest.raises(SystemExit, match="make the shards of their numbers: leave --shard and --num-shards out"):
        main([*given, "--shard", "0", "--num-shards", "2"])
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([*given, "--assignment", str(parts_of(unequal_source, world_size)), "--undirected"])
    return said.getvalue()


def test_the_command_is_started_by_torchrun(unequal_source: Path, tmp_path: Path) -> None:
    said = run_ranks(commanded, 2, unequal_source)
    for index in (0, 1):
        own = OneShard(index, 2, parts_of(unequal_source, 2))
        prepare_graph(unequal_source, tmp_path / "expected", shard=own, undirected=True)
        assert f"out/share-0000{index}: " in said[index] and ("will take at most" in said[index]) == (index == 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def cut(rank: int, world_size: int, unequal_source: Path, at: str) -> None:
    """Rank 1 is killed at a stage."""
    join(rank, world_size)
    on_progress = killing(rank, at)
    for name, partitioner in (("random", RandomPartitioner()), ("stream", StreamingPartitioner(passes=2))):
        own, out = OneShard(rank, world_size, partitioner, together=True), unequal_source.parent / name
        with contextlib.suppress(RuntimeError, FileExistsError):
            prepare_graph(unequal_source, out, shard=own, undirected=True, memory_bytes=12_000, on_progress=on_progress)


@pytest.mark.slow
def test_ranks_cut_as_one_host_does_that_has_the_graph(unequal_source: Path, tmp_path: Path) -> None:
    prepare_graph(unequal_source, tmp_path / "whole", undirected=True)
    graph = Graph.open(tmp_path / "whole")
    for at in ("cutting", ""):
        with start_ranks(cut, 3, unequal_source, at) as ranks:
            ranks.results(may_die={1})
    for name, partitioner in (("random", RandomPartitioner()), ("stream", StreamingPartitioner(passes=2))):
        np.save(tmp_path / f"{name}.npy", partitioner(graph, 3, seed=0).assignment.numpy())
        for index in range(3):
            own = OneShard(index, 3, tmp_path / f"{name}.npy")
            prepare_graph(unequal_source, tmp_path / f"{name} expected", shard=own, undirected=True)
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} expected")


def test_partitioners_that_need_the_whole_graph_are_refused(unequal_source: Path, tmp_path: Path) -> None:
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
        main(["prepare", str(unequal_source), str(tmp_path / "out"), "--partitioner", "random"])
