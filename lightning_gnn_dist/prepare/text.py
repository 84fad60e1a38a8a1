"""Texts as rows of numbers: by a function of the user's, or by hashing, which needs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from zlib import crc32

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.npy import Column

Embed = Callable[[Sequence[str]], Column]
WIDTH = 64
TEXTS_AT_ONCE = 1 << 14
_WORD = re.compile(r"\w+")


def hash_words(texts: Sequence[str]) -> Column:
    """One row for each text: every word adds 1 or -1 at two places that its checksum says.

    Two words that share one of them hardly share the other. The mean square of a row is 1.
    """
    pieces = [_counted(texts[first : first + TEXTS_AT_ONCE]) for first in range(0, len(texts), TEXTS_AT_ONCE)]
    rows = np.concatenate([np.empty((0, WIDTH), np.float32), *pieces])
    lengths: Column = np.linalg.norm(rows, axis=1, keepdims=True)
    rows *= WIDTH**0.5 / np.maximum(lengths, 1e-9)
    return rows


def _counted(texts: Sequence[str]) -> Column:
    known: dict[str, int] = {}
    of_texts = [[known.setdefault(word, len(known)) for word in _WORD.findall(text.lower())] for text in texts]
    row = np.repeat(np.arange(len(texts)), [len(words) for words in of_texts])
    word = np.fromiter(chain.from_iterable(of_texts), np.int64, len(row))
    sums = np.array([crc32(word.encode()) for word in known], np.int64)
    rows = np.zeros(len(texts) * WIDTH)
    for place, sign in ((sums, sums & (1 << 30)), (sums >> 8, sums & (1 << 31))):
        rows += np.bincount(row * WIDTH + (place % WIDTH)[word], np.where(sign, 1, -1)[word], len(rows))
    return rows.astype(np.float32).reshape(-1, WIDTH)


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
