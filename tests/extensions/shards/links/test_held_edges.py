"""Splits of edges in shards: where each held edge lies, what the index says, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist import LinkSplit, save_shards
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.shards.links import held_of_shard
from lightning_gnn_dist.graph.shard import Bounds, Shard
from tests.extensions.shards.links.splits import (
    WRITES,
    as_shards_have_it,
    directed_split,
    is_same,
    labelled_split,
    priced_split,
    typed_split,
    undirected_split,
    unequal,
)

SPLITS = [undirected_split, directed_split, labelled_split, lambda: typed_split(WRITES), priced_split]


@pytest.mark.parametrize("make", SPLITS, ids=["undirected", "directed", "labels", "typed", "typed labels"])
def test_held_edges_lie_with_the_owner_of_their_receiver(tmp_path: Path, make: Any) -> None:
    split: LinkSplit = make()
    partition = unequal(split.graph, 3)
    save_shards(split, partition, tmp_path / "shards")
    whole, _ = as_shards_have_it(split, partition)
    links, first = Bounds.read(tmp_path / "shards").links, dict.fromkeys(split.edges, 0)
    assert links is not None and Bounds.read(tmp_path / "shards").fingerprint == split.fingerprint
    said = split.undirected, split.edge_type, split.labels, split.hide
    assert (links.undirected, links.edge_type, links.labels, links.hide) == said
    assert links.reverse == (split.reverse if isinstance(split.reverse, tuple) else None)
    for index in range(3):
        shard = Shard.open(tmp_path / "shards", index)
        for name in split.edges:
            held = held_of_shard(shard, links, name)
            at = slice(first[name], first[name] + held.edges.shape[1])
            assert is_same(held.edges.long(), whole.edges[name][:, at])
            assert held.negatives is None or is_same(held.negatives.long(), whole.negatives[name][at])
            carried = whole.held_arrays.get(name, {})
            assert is_same(held.arrays, {array: rows[at] for array, rows in carried.items()})
            first[name] = at.stop
    assert first == {name: edges.shape[1] for name, edges in split.edges.items()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    split = undirected_split()
    save_shards(split, unequal(split.graph, 2), tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"held": {"val": [0, 1]}}, "it must say how many held edges shards have"),
        ({"held": {"val": [0, 5, 4]}}, "it must say how many held edges shards have"),
        ({"held": {"train": [0, 1, 2]}}, "it must say how many held edges shards have"),
        ({"held": [1]}, "the entry 'held' is"),
        ({"edge_type": ["a", "b", "c"]}, "the graph has no edges of type"),
        ({"hide": 3}, "the entry 'hide' is 3"),
    ],
)
def test_a_damaged_index_is_refused(shards: Path, entries: dict[str, Any], message: str) -> None:
    about = json.loads((shards / "shares.json").read_text())
    about["links"] |= entries
    (shards / "shares.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=message):
        Bounds.read(shards)


def test_held_edges_of_another_division_are_refused(shards: Path) -> None:
    about = json.loads((shards / "shares.json").read_text())
    about["links"]["held"]["val"][1] += 1
    (shards / "shares.json").write_text(json.dumps(about))
    bounds = Bounds.read(shards)
    assert bounds.links is not None
    with pytest.raises(ValueError, match=r"does not hold the \d+ val edges .*two divisions\. Copy both"):
        held_of_shard(Shard.open(shards, 0), bounds.links, "val")


def test_changed_held_edges_are_refused(shards: Path) -> None:
    file = shards / "share-00001" / "links" / "test_negatives.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    bounds = Bounds.read(shards)
    assert bounds.links is not None
    with pytest.raises(ValueError, match="test_negatives"):
        held_of_shard(Shard.open(shards, 1), bounds.links, "test")


def test_a_saved_split_is_divided_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    undirected_split().save(tmp_path / "split")
    folder = str(tmp_path / "shards")
    main(["divide", str(tmp_path / "split"), folder, "--parts", "2", "--partitioner", "random"])
    said = capsys.readouterr().out
    assert "edges are predicted; held back: " in said and "train on LinkDataModule(path)" in said
    main(["inspect", folder])
    held = [edges.shape[1] for edges in undirected_split().edges.values()]
    assert f"held back: {held[0]} to validate and {held[1]} to test" in capsys.readouterr().out
    main(["inspect", folder, "--check"])
    assert capsys.readouterr().out.count("all arrays are what was saved") == 2
    shutil.rmtree(tmp_path / "shards" / "share-00001")
    main(["inspect", folder, "--check"])
