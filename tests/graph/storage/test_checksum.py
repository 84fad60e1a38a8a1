"""XXH64: the numbers that its specification gives, in pieces of any length."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_gnn_dist.graph.storage.npy import Checksum

CONTENT = bytes(range(256)) * 5


def checksum(content: bytes, at_once: int) -> str:
    found, array = Checksum(), np.frombuffer(content, np.uint8)
    for start in range(0, len(array), at_once):
        found.update(array[start : start + at_once])
    return found.hexdigest()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "ef46db3751d8e999"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
        (CONTENT, "afc184ad7938a354"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 7, 32, 33, 10_000])
def test_known_numbers(content: bytes, expected: str, at_once: int) -> None:
    assert checksum(content, at_once) == expected
