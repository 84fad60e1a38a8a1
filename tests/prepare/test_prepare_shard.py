"""A shard made on its own host is the one that dividing the whole graph gives; kills and wrong files leave none."""

from __future__ import annotations

import gc
import os
import signal
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist import (
    Fetch,
    Graph,
    NeighborSampler,
    OneShard,
    Partition,
    PartitionedDataModule,
    prepare_graph,
    save_shards,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.prepare import journal
from lightning_gnn_dist.prepare.numbering import Numbering
from lightning_gnn_dist.prepare.shard import Shard
from tests.placing import placed
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

NUM_NODES, NUM_EDGES, PARTS = 300, 5000, 3
STAGES = [
    "copying arrays",
    "reading edges",
    "counting edges",
    "dealing edges into buckets",
    "sorting edges",
    "taking the fingerprint",
]


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
    with pytest.raises(SystemExit, match="is no table of nodes: give a text"):
        main(["prepare", *given[:3], str(source / "y.npy"), "--shard", "0", "--num-shards", "2"])


def judged(rank: int, world_size: int, hosts: str) -> list[list[int]]:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    data = PartitionedDataModule(f"{hosts}/host{rank}", sampler=NeighborSampler([3]), boundary=Fetch())
    placed(data, rank, world_size)
    data.setup("fit")
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    data.teardown("fit")
    dist.destroy_process_group()
    return [batch.n_id[: batch.batch_size].tolist() for batch in batches if batch.num_edges]


def test_ranks_learn_and_judge_across_shards_of_their_own_making(source: Path, tmp_path: Path) -> None:
    for index in range(2):
        settings: dict[str, Any] = {"split": (0.5, 0.25, 0.25), "drop": ("train_idx",)}
        prepare_graph(source, tmp_path / f"host{index}", shard=OneShard(index, 2), **settings)
    found = run_ranks(judged, 2, str(tmp_path))
    seeds = sorted(node for of_rank in found for batch in of_rank for node in batch)
    assert len(seeds) == len(set(seeds)) == NUM_NODES * 3 // 4


def test_a_split_is_the_same_on_all_hosts(source: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"split": (0.5, 0.25, 0.25), "seed": 4, "drop": ("train_idx",)}
    assignment = np.arange(NUM_NODES) // (NUM_NODES // PARTS)
    expected = divided(source, tmp_path, assignment, **settings)
    prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS), **settings)
    assert same(Shard.open(tmp_path / "host", 1).rows, expected[1].rows)


def test_ranges_are_as_even_as_can_be() -> None:
    assert Numbering.ranges(11, 4).bounds.tolist() == [0, 3, 6, 9, 11]
    with pytest.raises(ValueError, match="3 nodes cannot be divided into 4 shards"):
        Numbering.ranges(3, 4)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_kill_the_same_call_goes_on(source: Path, tmp_path: Path, stage: str) -> None:
    prepare_graph(source, tmp_path / "expected", shard=OneShard(1, PARTS), undirected=True, memory_bytes=20_000)
    assert kill_at(stage, source, tmp_path / "host") == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match=r"Shard 1 of 3 is not on this host|has no shares.json"):
        Shard.open(tmp_path / "host", 1)
    prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS), undirected=True, memory_bytes=20_000)
    assert same(Shard.open(tmp_path / "host", 1).rows, Shard.open(tmp_path / "expected", 1).rows)
    assert (tmp_path / "host" / "shares.json").read_text() == (tmp_path / "expected" / "shares.json").read_text()


def kill_at(stage: str, source: Path, host: Path) -> int:
    """In a process of its own; what it exits with."""
    pid = os.fork()
    if pid == 0:
        journal.RECORD_SECONDS = 0.0

        def kill(now: str, share: float) -> None:
            if now == stage and (share >= 0.5 or stage != "sorting edges"):
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            prepare_graph(
                source, host, shard=OneShard(1, PARTS), undirected=True, memory_bytes=20_000, on_progress=kill
            )
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_shards_of_other_files_do_not_join(source: Path, tmp_path: Path) -> None:
    prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    with pytest.raises(ValueError, match=r"describes 3 shards that are not these 2"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(1, 2))
    (source / "edge_index" / "3.npy").unlink()  # this host lacks a file that the others have
    with pytest.raises(ValueError, match="shards of other edges, labels or settings"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(1, PARTS))
    assert not (tmp_path / "host" / "share-00001").exists()


def connect(rank: int, world_size: int, folder: str) -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=30))
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


def test_a_truncated_file_of_edges_is_refused(source: Path, tmp_path: Path) -> None:
    file = source / "edge_index" / "2.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"2.npy is truncated"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))


def test_a_truncated_shard_is_refused(source: Path, tmp_path: Path) -> None:
    prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))
    file = tmp_path / "host" / "share-00000" / "nodes" / "x.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"x.npy cannot be used"):
        Shard.open(tmp_path / "host", 0)


def test_ids_out_of_range_are_refused(source: Path, tmp_path: Path) -> None:
    np.save(source / "edge_index" / "1.npy", np.array([[0, 1], [2, NUM_NODES]]))
    with pytest.raises(ValueError, match=r"1.npy names node 300, but the graph has 300 nodes"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(0, PARTS))


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (np.full(NUM_NODES, PARTS), r"names parts 3 to 3, but there are 3 shards"),
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


@pytest.mark.parametrize(("index", "num_shards"), [(3, 3), (-1, 3), (0, 0)])
def test_a_shard_that_cannot_be_is_refused(source: Path, tmp_path: Path, index: int, num_shards: int) -> None:
    with pytest.raises(ValueError, match=r"index must be below 3|must be an integer of at least"):
        prepare_graph(source, tmp_path / "host", shard=OneShard(index, num_shards))


def test_memory_does_not_grow_with_the_edges(tmp_path: Path) -> None:
    """Ten times the edges, the same peak: what this process allocates beside its own nodes."""
    peaks = []
    for count in (100_000, 1_000_000):
        source = tmp_path / str(count)
        source.mkdir()
        np.save(source / "edge_index.npy", np.random.default_rng(0).integers(0, 1000, (2, count), np.int32))
        np.save(source / "num_nodes.npy", np.array(1000))
        prepare_graph(source, tmp_path / f"first{count}", shard=OneShard(0, 4), memory_bytes=500_000)  # compiles
        gc.collect()
        tracemalloc.start()
        prepare_graph(source, tmp_path / f"host{count}", shard=OneShard(1, 4), memory_bytes=500_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 3_000_000
    assert peaks[1] < 1.5 * peaks[0]
