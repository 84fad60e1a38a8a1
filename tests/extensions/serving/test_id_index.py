"""Nodes are found by their users' ids, one at a time, and what is no such id finds none."""

from typing import Any

import numpy as np
import pytest

from lightning_gnn_dist.extensions.serving.question import IdIndex

STRANGE: list[Any] = ["zz", "b\0", "\ud800", "x" * 999, 5, 2**80, -(2**80), 7.0, True, None, ["b"]]


@pytest.mark.parametrize("ids", [["b", "a", "longer", "ü", "c"], [7, -3, 900, 2**40], ["b"]])
def test_a_node_is_found_by_its_id(ids: list[Any]) -> None:
    index = IdIndex(np.array(ids))
    assert [index.find(name) for name in ids] == list(range(len(ids)))
    assert [index.find(name) for name in STRANGE] == [None] * len(STRANGE)
