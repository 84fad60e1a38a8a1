"""Texts as rows of numbers: by a function of the user's, or by hashing, which needs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from zlib import crc32

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.npy import Column

Embed = Callable[[Sequence[str]], Column]
WIDTH = 64
_WORD = re.compile(r"\w+")


def hash_words(texts: Sequence[str]) -> Column:
    """One row for each text: every word adds 1 or -1 at two places that its checksum says.

    Two words that share one of them hardly share the other. The mean square of a row is 1.
    """
    rows = np.zeros((len(texts), WIDTH), np.float32)
    for row, text in zip(rows, texts, strict=True):
        for word in _WORD.findall(text.lower()):
            found = crc32(word.encode())
            row[found % WIDTH] += 1 if found & (1 << 30) else -1
            row[(found >> 8) % WIDTH] += 1 if found & (1 << 31) else -1
    lengths: Column = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Column = rows * (WIDTH**0.5 / np.maximum(lengths, 1e-9))
    return scaled


def embedding(name: str | None) -> Embed:
    """The function that a manifest names, as ``module:function``; hashing if it names none."""
    if name is None:
        return hash_words
    module, _, function = str(name).partition(":")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"text names {shown(name)}, and it cannot be imported ({error}): name a module on the path and its "
            "function, as in my_module:embed."
        ) from error
    return lambda texts: _checked(found(list(texts)), len(texts), name)


def _checked(rows: object, count: int, name: str) -> Column:
    found = np.asarray(rows, np.float32)
    if found.ndim != 2 or len(found) != count or not np.isfinite(found).all():
        raise ValueError(
            f"text names {shown(name)}, which made an array of shape {found.shape} of {count} texts: it must return "
            "one row of finite numbers for each."
        )
    return found
