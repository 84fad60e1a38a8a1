"""Files of a split of edges that were damaged, or do not fit: refused in a sentence, before a loop runs on them."""

from pathlib import Path

import numpy as np
import pytest

import lightning_gnn_dist as lgd
from tests.graph.storage.test_store import Damage, another_kind, array, damaged, entry, graph_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, graph = tmp_path_factory.mktemp("saved"), graph_of(0)
    lgd.split_edges(graph, negatives=3).save(root / "mine" / "links")
    return root


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("links/val_edges.npy", another_kind(str)),
        ("links/val_edges.npy", array(lambda ends: ends + 1000)),
        ("links/undirected.npy", array(lambda flag: flag.astype(np.int64))),
        ("links/undirected.npy", array(np.zeros_like)),
        ("links/val_edges.npy", array(np.zeros_like)),
        ("indices.npy", entry(7, 10**9)),
    ],
)
def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path, file: str, damage: Damage) -> None:
    path = damaged(saved, tmp_path, "links", file, damage)
    with pytest.raises(ValueError, match=str(path)):
        lgd.LinkSplit.open(path)
