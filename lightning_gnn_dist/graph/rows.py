"""Rows of a CSR and of arrays, by ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from lightning_gnn_dist.graph.convert import index_dtype

EDGES_PER_PIECE = 1 << 20  # bounds what look-ups hold in RAM, which take about 70 bytes per edge
NODES_PER_PIECE = 1 << 18  # the same for nodes
ROWS_PER_PIECE = 1 << 14  # the same for rows of arrays, which are wide
_IDS_PER_NODE = 8  # a table of ids has 4 bytes for each


class Lookup:
    """Finds the positions of node ids in ``nodes``.

    Where nodes are dense among the ids between the first and the last, many ids are looked up in a table of all of
    these, which is ten times as fast as a binary search.
    """

    def __init__(self, nodes: Tensor) -> None:
        self.order: Tensor | None = None
        self._table: Tensor | None = None  # the place of each id behind the first, -1 where it is none of the nodes
        if bool((nodes[1:] > nodes[:-1]).all()):
            self.ids = nodes
            return
        self.ids, self.order = nodes.sort()
        if (self.ids[1:] == self.ids[:-1]).any():
            twice = int(self.ids[1:][self.ids[1:] == self.ids[:-1]][0])
            raise ValueError(f"Every node may be given once, but node {twice} is given twice.")

    def contains(self, ids: Tensor) -> Tensor:
        return self._nearest(ids)[1]

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The positions in ``nodes`` of those ids that it holds, and a boolean per id: whether it holds it."""
        at, found = self._nearest(ids)
        return at[found] if self.order is None else self.order[at[found]], found

    def _nearest(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.ids.numel() == 0:
            return ids, torch.zeros_like(ids, dtype=torch.bool)
        if ids.numel() < self.ids.numel() or not self._has_table():
            at = torch.searchsorted(self.ids, ids).clamp_(max=self.ids.numel() - 1)
            return at, self.ids[at] == ids
        assert self._table is not None
        behind = ids - self.ids[0]
        is_between = (behind >= 0) & (behind < self._table.numel())
        at = self._table[behind.clamp_(0, self._table.numel() - 1)].to(torch.int64)
        return at, (at >= 0) & is_between

    def _has_table(self) -> bool:
        """Make the table, unless it would be sparse."""
        if self._table is None:
            length, count = int(self.ids[-1] - self.ids[0]) + 1, self.ids.numel()
            if length > _IDS_PER_NODE * count:
                return False
            self._table = torch.full((length,), -1, dtype=torch.int32 if count < 1 << 31 else torch.int64)
            self._table[self.ids - self.ids[0]] = torch.arange(count, dtype=self._table.dtype)
        return True


def edge_positions(indptr: Tensor, rows: Tensor) -> Tensor:
    """The positions in ``indices`` of the edges of ``rows``, row after row."""
    start = indptr[rows]
    degree = indptr[rows + 1] - start
    before = degree.cumsum(0) - degree
    return torch.arange(int(degree.sum())) + (start - before).repeat_interleave(degree)


def bytes_per_row(arrays: Mapping[str, Tensor]) -> int:
    """The bytes of one row of every array, added up."""
    return sum(prod(array.shape[1:]) * array.element_size() for array in arrays.values())


def take_rows(array: Tensor, rows: Tensor) -> Tensor:
    """A copy of ``array[rows]`` in RAM; a memory map is read forwards, whatever the order of ``rows``."""
    if rows.numel() < 2 or bool((rows[1:] > rows[:-1]).all()):
        return array.index_select(0, rows)
    order = rows.argsort()
    out = array.new_empty((rows.numel(), *array.shape[1:]))
    for some in order.split(ROWS_PER_PIECE):
        out[some] = array.index_select(0, rows[some])
    return out


def degrees_of(indptr: Tensor, nodes: Tensor) -> Tensor:
    """The in-degrees of ``nodes``, in their order."""
    pieces = [indptr[some + 1] - indptr[some] for some in nodes.split(NODES_PER_PIECE)]
    return torch.cat([nodes[:0], *pieces])


def starts_of(degrees: Tensor) -> Tensor:
    """Return where rows of so many edges start, and where the last one ends."""
    return torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])


def count_edges(indptr: Tensor, nodes: Tensor) -> int:
    """The sum of the in-degrees of ``nodes``."""
    return int(degrees_of(indptr, nodes).sum())


def row_slices(indptr: Tensor) -> Iterator[slice]:
    """Yield all rows in slices of at most ``EDGES_PER_PIECE`` edges, or of one row that has more."""
    first, num_rows = 0, indptr.numel() - 1
    while first < num_rows:
        reached = int(torch.searchsorted(indptr, int(indptr[first]) + EDGES_PER_PIECE, right=True)) - 1
        last = min(max(reached, first + 1), num_rows, first + NODES_PER_PIECE)
        yield slice(first, last)
        first = last


def row_pieces(indptr: Tensor, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``nodes`` in pieces, each with the positions of its edges in ``indices``."""
    for some in nodes.split(NODES_PER_PIECE):
        degree = degrees_of(indptr, some)
        piece = (degree.cumsum(0) - degree) // EDGES_PER_PIECE
        for rows in some.split(piece.unique_consecutive(return_counts=True)[1].tolist()):
            yield rows, edge_positions(indptr, rows)


def senders_outside(indptr: Tensor, indices: Tensor, nodes: Tensor) -> Tensor:
    """Return the nodes outside ``nodes`` that send to one of them, in increasing order."""
    lookup, outside = Lookup(nodes), [nodes[:0]]
    for _, at in row_pieces(indptr, nodes):
        senders = indices[at].to(torch.int64).unique()
        outside.append(senders[~lookup.contains(senders)])
    found: Tensor = torch.cat(outside).unique()
    return found


def check_form(indptr: Tensor, indices: Tensor) -> None:
    """Refuse anything but two vectors of integers, of which the first begins at 0 and ends where the second does."""
    if indptr.dim() != 1 or indptr.numel() == 0 or indices.dim() != 1:
        raise ValueError("indptr and indices must be vectors, and indptr must hold one entry more than nodes.")
    if indptr.dtype != torch.int64 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indptr and indices must hold integers, got {indptr.dtype} and {indices.dtype}: give indptr "
            "as torch.int64, and indices as torch.int32 or torch.int64."
        )
    if int(indptr[0]) != 0:
        raise ValueError(f"indptr must start at 0, got {int(indptr[0])}.")
    if int(indptr[-1]) != indices.numel():
        raise ValueError(f"indptr ends at {int(indptr[-1])}, but indices holds {indices.numel()} edges.")


def check_csr(indptr: Tensor, indices: Tensor, num_senders: int, at_once: int) -> None:
    """Refuse rows that overlap and senders beyond ``num_senders``, reading both arrays in pieces of ``at_once``."""
    for start in range(0, max(indptr.numel() - 1, 1), at_once):
        piece = indptr[start : start + at_once + 1]
        if bool((falls := piece[1:] < piece[:-1]).any()):
            row = int(falls.nonzero()[0])
            raise ValueError(
                f"indptr must not fall, but row {start + row} goes from {int(piece[row])} to {int(piece[row + 1])}."
            )
    check_form(indptr, indices)
    for piece in indices.split(at_once) if indices.numel() else ():
        low, high = (int(end) for end in piece.aminmax())
        if low < 0 or high >= num_senders:
            raise ValueError(f"indices must lie in [0, {num_senders}), got {low} to {high}.")


def senders_by_row(indptr: Tensor, senders: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all edges in pieces: for each the number of its row, and its sender, int64."""
    for some in row_slices(indptr):
        starts = indptr[some.start : some.stop + 1]
        rows = torch.arange(some.start, some.stop).repeat_interleave(starts.diff())
        yield rows, senders[int(starts[0]) : int(starts[-1])].to(torch.int64)


def induced_rows(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    nodes: Tensor,
    receives: Tensor,
    on_kept: Callable[[Tensor], None] = lambda positions: None,
) -> tuple[Tensor, Tensor]:
    """The edges among some nodes: where the row of each starts, and the senders, by their places among the nodes.

    Args:
        indptr: Where each whole row starts.
        indices: The senders of whole rows, row after row.
        rows: Which of these rows are of the nodes that receive, in the order of these.
        nodes: The nodes.
        receives: Which of them receive; the others have empty rows.
        on_kept: Is called with the positions of the edges among the nodes, piece after piece.
    """
    done, filled, lookup = 0, 0, Lookup(nodes)
    degrees = torch.zeros_like(rows)
    # Room for all edges into these nodes: memory that is never written to takes no RAM.
    senders = torch.empty(count_edges(indptr, rows), dtype=index_dtype(nodes.numel()))
    for some, at in row_pieces(indptr, rows):
        local, found = lookup(indices[at].to(torch.int64))
        senders[filled : filled + local.numel()] = local
        on_kept(at[found])
        row = torch.arange(some.numel()).repeat_interleave(degrees_of(indptr, some))
        degrees[done : done + some.numel()] = torch.bincount(row[found], minlength=some.numel())
        done, filled = done + some.numel(), filled + local.numel()
    return starts_of(torch.zeros_like(nodes).masked_scatter_(receives, degrees)), senders[:filled]
