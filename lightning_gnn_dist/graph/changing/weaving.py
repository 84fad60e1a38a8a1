"""Weaves rows into arrays of edges, and takes others out, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE

Grow = Callable[[Tensor, int], Tensor]  # an array with room for so many more rows


class Places(NamedTuple):
    """Where the rows of an array change, by their numbers.

    Attributes:
        gone: The rows that go, each once and increasing.
        before: Before which row each new one comes, never falling; the number of rows stands for the end.
    """

    gone: Tensor
    before: Tensor

    def appends_to(self, num_rows: int) -> bool:
        """Whether all that changes comes behind what is there."""
        return not self.gone.numel() and bool((self.before == num_rows).all())


def woven(
    array: Tensor, places: Places, rows: Tensor, grow: Grow, move: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The array with new rows and without those that go. Where rows come behind all others, nothing else is copied.

    Args:
        array: What is there.
        places: Where it changes.
        rows: The new rows.
        grow: Makes room for more rows behind others.
        move: What becomes of each piece of those that are there. Default: they stay as they are.
    """
    if move is None and places.appends_to(len(array)):
        if not len(rows):
            return array
        grown = grow(array, len(rows))
        grown[len(array) :] = rows
        return grown
    out = rows.new_empty((len(array) - len(places.gone) + len(rows), *array.shape[1:]))
    filled, taken = 0, 0
    for first, gone, before in _pieces(places, len(array)):
        piece = array[first : first + EDGES_PER_PIECE]
        piece = piece if move is None else move(piece)
        new = rows[taken : taken + len(before)]
        to = out[filled : filled + len(piece) - len(gone) + len(before)]
        _weave(piece, gone - first, before - first, new, to)
        filled, taken = filled + len(to), taken + len(before)
    return out


def _pieces(places: Places, num_rows: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield where each piece of an array begins, and what changes in it; the last one has what comes at the end."""
    starts = torch.arange(0, max(num_rows, 1), EDGES_PER_PIECE)
    cuts = [[*torch.searchsorted(each, starts).tolist(), len(each)] for each in places]
    for number, first in enumerate(starts.tolist()):
        gone, before = (each[cut[number] : cut[number + 1]] for each, cut in zip(places, cuts, strict=True))
        yield first, gone, before


def _weave(piece: Tensor, gone: Tensor, before: Tensor, new: Tensor, to: Tensor) -> None:
    if len(gone):
        stays = torch.ones(len(piece), dtype=torch.bool)
        stays[gone] = False
        piece, before = piece[stays], before - torch.searchsorted(gone, before)
    if not len(before):
        to.copy_(piece)
        return
    is_new = torch.zeros(len(to), dtype=torch.bool)
    is_new[before + torch.arange(len(before))] = True
    to[is_new], to[~is_new] = new, piece


def ranks_of_type(kinds: Tensor, number: int, positions: Tensor) -> Tensor:
    """How many edges of a type come before each position. ``positions`` never fall; one may be the end."""
    out, counted = torch.empty_like(positions), 0
    pieces = kinds.split(EDGES_PER_PIECE)
    ends = torch.searchsorted(positions, torch.arange(len(pieces) + 1) * EDGES_PER_PIECE).tolist()
    for index, piece in enumerate(pieces):
        is_one = piece == number
        if (some := slice(ends[index], ends[index + 1])).stop > some.start:
            up_to = torch.cat([torch.zeros(1, dtype=torch.int64), is_one.cumsum(0)])
            out[some] = counted + up_to[positions[some] - index * EDGES_PER_PIECE]
        counted += int(is_one.sum())
    out[positions == len(kinds)] = counted
    return out
