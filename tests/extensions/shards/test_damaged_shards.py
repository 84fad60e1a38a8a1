"""Files of shards that were damaged, or do not fit: refused in a sentence, before a loop runs on them."""

from pathlib import Path

import numpy as np
import pytest

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.shards.index import Shard
from tests.graph.storage.test_store import NUM_NODES, OF_TEXT, Damage, array, changed, damaged, entry, graph_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, graph = tmp_path_factory.mktemp("saved"), graph_of(0)
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, 0), root / "mine" / "shares")
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
