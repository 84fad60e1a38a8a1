"""A shard made on its own host is the one that dividing the whole graph gives; kills and wrong files leave none."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_gnn_dist import (
    Fetch,
    Graph,
    Partition,
    PartitionedDataModule,
    prepare_graph,
    save_shards,
)
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from tests.every_strategy import plain_ddp
from tests.ranks import RankError, run_ranks
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
        prepare_graph(source, tmp_path / "expected", shard=own, undirected=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    with pytest.raises(SystemExit, match="make the shards of their numbers: leave --shard and --num-shards out"):
        main([*given, "--shard", "0", "--num-shards", "3"])
