"""Compares what edges carry, row by row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def numbered_rows(array: Tensor) -> Tensor:
    """A number for each row, the same for equal ones. NaN equals NaN."""
    rows = array.flatten(1) if array.dim() > 1 else array[:, None]
    if rows.is_floating_point():
        rows = torch.cat([rows.nan_to_num(0.0), rows.isnan().to(rows.dtype)], 1)
    numbers: Tensor = rows.unique(dim=0, return_inverse=True)[1]
    return numbers


def counts_of_rows(there: Tensor, back: Tensor, arrays: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """How often each edge occurs among some, and among others.

    Args:
        there: A number for each edge of the first.
        back: A number for each of the others.
        arrays: What the first carry and what the others carry. Edges are equal if their numbers and all of it are.

    Returns:
        A count for each distinct edge among the first, and one among the others.
    """
    kinds = torch.cat([there, back]).unique(return_inverse=True)[1]
    for array, other in arrays if kinds.numel() else ():
        kinds = (kinds * kinds.numel() + numbered_rows(torch.cat([array, other]))).unique(return_inverse=True)[1]
    first, others = kinds.split([there.numel(), back.numel()])
    count = int(kinds.max()) + 1 if kinds.numel() else 0
    return torch.bincount(first, minlength=count), torch.bincount(others, minlength=count)


def is_same(there: Tensor, back: Tensor, array: Tensor, other: Tensor) -> bool:
    """Whether edges with these numbers carry the same rows as those with other numbers, in any order and number."""
    first, others = counts_of_rows(there, back, [(array, other)])
    return torch.equal(first > 0, others > 0)
