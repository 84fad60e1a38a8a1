"""Rows of words as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def in_columns(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Return a line for each row, all cells of a column as wide as its widest."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]
