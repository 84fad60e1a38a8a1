"""Shards on disk: all of the graph, each part once, and nothing half-written."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, Partition, RandomPartitioner, communities, save_shards, split_edges
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.graph.storage.npy import NpyFile
from lightning_gnn_dist.wire.channel import Channel
from tests.extensions.shards.graphs import change
from tests.graph.parted import small_graph, some_partition, typed_graph_of_widths, uneven_partition
from tests.graph.storage.test_store import NUM_NODES, OF_TEXT, Damage, array, changed, damaged, entry, graph_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graph = small_graph(edge_arrays=True)
    save_shards(graph, some_partition(graph, 3), tmp_path / "shares")
    return tmp_path / "shares"


def test_a_host_needs_its_own_shard_only(folder: Path) -> None:
    shutil.rmtree(folder / "share-00000")
    assert Shard.open(folder, 1).rows.num_nodes > 0
    with pytest.raises(FileNotFoundError, match=r"Shard 0 of 3 is not on this host: copy .*share-00000"):
        Shard.open(folder, 0)
    with pytest.raises(ValueError, match="3 shards, so there is no shard 3"):
        Shard.open(folder, 3)


def test_shards_of_two_divisions_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    other = small_graph(200, edge_arrays=True)
    save_shards(other, some_partition(other, 3), tmp_path / "other")
    shutil.rmtree(folder / "share-00001")
    shutil.copytree(tmp_path / "other" / "share-00001", folder / "share-00001")
    with pytest.raises(ValueError, match="they come from two divisions"):
        Shard.open(folder, 1)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_shards"):
        Shard.open(tmp_path, 0)


def test_nothing_is_left_of_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    save, room = Graph.save, iter(range(2))

    def save_while_there_is_room(graph: Graph, path: Path, **options: Any) -> None:
        if next(room, None) is None:
            raise OSError("No space left on device")
        save(graph, path, **options)

    monkeypatch.setattr(Graph, "save", save_while_there_is_room)
    with pytest.raises(OSError, match="No space"):
        save_shards(graph, some_partition(graph, 3), tmp_path / "shares")
    assert not list(tmp_path.iterdir())


def test_a_partition_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="assigns 200 nodes, but the graph has 300"):
        save_shards(small_graph(), some_partition(small_graph(200), 3), tmp_path / "shares")
    with pytest.raises(ValueError, match="Part 1 of the partition has no nodes"):
        save_shards(small_graph(), Partition(torch.zeros(300).int(), 2), tmp_path / "shares")


def test_a_rank_needs_the_shard_of_its_place(folder: Path) -> None:
    with pytest.raises(ValueError, match="Rank 0 of 1 needs shard 0 of 1, and has shard 1 of 3"):
        ShardedGraph(Shard.open(folder, 1), Channel(None, 1, 0))


# Files that were damaged, or do not fit, are refused in a sentence before a loop runs on them.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, graph = tmp_path_factory.mktemp("saved"), graph_of(0)
    save_shards(graph, RandomPartitioner()(graph, 2, 0), root / "mine" / "shares")
    return root


@pytest.mark.parametrize("damage", OF_TEXT.values(), ids=OF_TEXT)
def test_a_damaged_description_is_refused(saved: Path, tmp_path: Path, damage: Damage) -> None:
    path = damaged(saved, tmp_path, "shares", "shares.json", damage)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{path}"):
        Shard.open(path, 0)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("share-00000/indices.npy", entry(3, NUM_NODES)),
        ("share-00000/indices.npy", entry(3, -1)),
        ("share-00000/nodes/n_id.npy", array(lambda ids: np.where(ids == ids[1], ids[0], ids))),
        ("share-00000/nodes/n_id.npy", array(lambda ids: ids - 100)),
        ("shares.json", changed(lambda raw: raw.replace(b'"nodes": [\n  0', b'"nodes": [\n  9'))),
        ("shares.json", changed(lambda raw: raw.replace(b'"edges": [\n  0', b'"edges": [\n  -1'))),
        ("shares.json", changed(lambda raw: raw.replace(b'"nodes": [\n  0,', b'"nodes": [\n  0, 0,'))),
    ],
)
def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path, file: str, damage: Damage) -> None:
    path = damaged(saved, tmp_path, "shares", file, damage)
    with pytest.raises(ValueError, match=r"damaged|is not the file|come from two divisions"):
        Shard.open(path, 0)


# Shards of a typed graph: what they hold, and what is refused of files that do not fit.


@pytest.fixture
def typed_folder(tmp_path: Path) -> Path:
    save_shards(typed_graph_of_widths(), uneven_partition(typed_graph_of_widths(), 3), tmp_path / "shards")
    return tmp_path / "shards"


def test_an_order_of_time_stays(tmp_path: Path) -> None:
    graph = Graph.from_pyg(typed_graph_of_widths().to_pyg(), time="time")
    save_shards(graph, uneven_partition(graph, 2), tmp_path / "shards")
    types = Shard.open(tmp_path / "shards", 0).rows.types
    assert types is not None and types.time == "time" and types.seeds == "paper"


STARTS = [["paper", [0, 1, 11, 12]], ["author", [0, 3, 7, 7]], ["venue", [0, 0, 2, 3]]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"nodes": 3}, "the entry 'nodes' is 3"),
        ({"nodes": STARTS[:2]}, r"shares\.json is damaged \(.*'venue', which is not there .*\)\. Copy it again\.$"),
        ({"nodes": []}, r"shares\.json is damaged \(A typed graph needs a node type and an edge type at least\)"),
        ({"nodes": [*STARTS, STARTS[0]]}, r"shares\.json is damaged \('paper' and 'paper' would have one folder"),
        ({"nodes": [[name, starts[:-1]] for name, starts in STARTS]}, "where it begins in each shard"),
        ({"nodes": [["paper", [0, 12, 11, 12]], *STARTS[1:]]}, "where it begins in each shard"),
        ({"nodes": [["paper", "author", [0, 1, 11, 12]], *STARTS[1:]]}, "where it begins in each shard"),
        ({"nodes": [["paper", [0, 0, 0, 1]], *STARTS[1:]]}, "types do not add up to all nodes"),
        ({"nodes": [["pa/per", [0, 1, 11, 12]], *STARTS[1:]]}, r"damaged \('pa/per' cannot be the name of a type, "),
        ({"seeds": "papers"}, r"shares\.json is damaged \(task must be one of .*'papers'\)\. Copy it again"),
        ({"seeds": 3}, "the entry 'seeds' is 3"),
    ],
)
def test_a_damaged_index_is_refused(typed_folder: Path, entries: dict[str, Any], message: str) -> None:
    change(typed_folder / "shares.json", "types", **entries)
    with pytest.raises(ValueError, match=message):
        Bounds.read(typed_folder)


@pytest.mark.parametrize("has_types", [True, False])
def test_a_flipped_bit_is_found(has_types: bool, tmp_path: Path) -> None:
    """Arrays of one number per row when a shard is opened; features, which may be large, when somebody asks."""
    graph = typed_graph_of_widths() if has_types else communities(100)
    save_shards(graph, uneven_partition(graph, 3), tmp_path / "shards")
    files = [file for file in (tmp_path / "shards" / "share-00000").rglob("*.npy") if file.stat().st_size > 128]
    assert len(files) > 4
    for file in files:
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[-1] ^= 1
        file.chmod(0o644)
        file.write_bytes(damaged)
        if NpyFile.of(file).shape[1:] == ():
            with pytest.raises(ValueError, match=r"npy is (damaged|not the file that was saved)"):
                Shard.open(tmp_path / "shards", 0)
        with pytest.raises(SystemExit, match=r"npy is (damaged|not the file that was saved)"):
            main(["inspect", "--check", str(tmp_path / "shards")])
        file.write_bytes(content)


def test_types_and_none_are_not_mixed(typed_folder: Path) -> None:
    about = json.loads((typed_folder / "shares.json").read_text())
    del about["types"]
    (typed_folder / "shares.json").unlink()
    (typed_folder / "shares.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"has types, and shares\.json knows of none"):
        Shard.open(typed_folder, 0)


@pytest.mark.parametrize("senders", [[0, 1, 2, 22], [0, 12, 19], [1, 12, 19, 22], [0, 19, 12, 22], "no"])
def test_senders_that_cannot_be_are_refused(typed_folder: Path, senders: Any) -> None:
    assert Shard.open(typed_folder, 1).rows.num_edges
    change(typed_folder / "share-00001" / "meta.json", "types", senders=senders)
    with pytest.raises(ValueError, match="its ends are of other types" if senders == [0, 1, 2, 22] else "senders"):
        Shard.open(typed_folder, 1)


def test_a_shard_is_no_whole_graph(typed_folder: Path, tmp_path: Path) -> None:
    rows = Shard.open(typed_folder, 0).rows
    for use in (
        rows.to_pyg,
        lambda: save_shards(rows, Partition(torch.zeros(rows.num_nodes).int(), 1), tmp_path / "b"),
        lambda: split_edges(rows, 0.5, 0.0),
    ):
        with pytest.raises(ValueError, match="it is a shard, and the whole graph is needed"):
            use()


def test_the_commands_divide_and_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data: HeteroData = typed_graph_of_widths().to_pyg()  # type: ignore[assignment]
    Graph.from_pyg(data).save(tmp_path / "graph")
    main(["divide", str(tmp_path / "graph"), str(tmp_path / "shards"), "--parts", "2", "--partitioner", "random"])
    said = capsys.readouterr().out
    assert "2 shards of 11 to 11 nodes" in said and "PartitionedDataModule(path)" in said
    main(["inspect", str(tmp_path / "shards")])
    told = capsys.readouterr().out
    assert told.splitlines()[1:] == said.splitlines()[1:-1]
    assert told.splitlines()[1].split() == ["nodes", "all", "smallest", "shard", "largest"]
    assert told.splitlines()[4].split()[:2] == ["venue", "3"] and told.splitlines()[-1] == "learned from: paper"
    main(["inspect", "--check", str(tmp_path / "shards")])
    assert capsys.readouterr().out.count("all arrays are what was saved") == 2
    with pytest.raises(SystemExit, match="holds shards: --check reads them"):
        main(["inspect", str(tmp_path / "shards"), "--parts", "2"])
    with pytest.raises(SystemExit, match="exists already"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shards"), "--parts", "2"])


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a saved graph"):
        main(["divide", str(tmp_path), str(tmp_path / "shares"), "--parts", "2"])
    communities(200).save(tmp_path / "graph")
    unheard = ["--partitioner", "random", "--balance", "train"]
    with pytest.raises(SystemExit, match="for METIS, and RandomPartitioner evens out nodes"):
        main(["divide", str(tmp_path / "graph"), str(tmp_path / "shares"), "--parts", "2", *unheard])
