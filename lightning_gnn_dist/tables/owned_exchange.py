r"""Rows that ranks send to their owners, and what an owner makes of them: at a meeting a mean, of gradients a sum.

The formulas are those of tables that every rank holds (:mod:`~lightning_gnn_dist.tables.merging`), row by row, and
terms are added in the order of ranks, so that both come to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_gnn_dist.tables.merging import means_of
from lightning_gnn_dist.tables.row_owners import bounds_of, pieces_of, short
from lightning_gnn_dist.tables.touches import Rows
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.pieces import exchange_pieces

TouchedIn = Callable[[Sequence[tuple[int, int]]], Rows]  # what a rank has touched in some ranges of ids


def to_owners(num_rows: int, rows: Rows, flags: Sequence[int] = ()) -> tuple[list[Rows], list[list[int]]]:
    """Send rows of a table to their owners; return the rows of each rank that lie here, and its flags. Collective.

    Args:
        num_rows: How many rows the table has.
        rows: What this rank sends. All ranks have the same tensors.
        flags: Numbers of the caller's, as many on all ranks.
    """
    bounds, device = bounds_of(num_rows, collectives.world_size()), rows.values[0].device
    ids = rows.ids.to(device)
    ends = [*pairwise(torch.searchsorted(ids, torch.tensor(bounds, device=device)).tolist())]
    ranks = collectives.gather_numbers([*flags, *(stop - start for start, stop in ends)], device)
    counts = [numbers[len(flags) :] for numbers in ranks]
    pairs = zip(bounds, ends, strict=False)
    sent = [
        [short(ids[start:stop] - first, num_rows), *(each[start:stop] for each in rows.values)]
        for first, (start, stop) in pairs
    ]
    came = exchange_pieces(sent, [[[count] * len(sent[0]) for count in of_rank] for of_rank in counts])
    found = [Rows(places.long(), values) for places, *values in came]
    return found, [numbers[: len(flags)] for numbers in ranks]


@torch.no_grad()
def mean_at_owners_(num_rows: int, own: TouchedIn, tensors: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Replace rows that ranks have touched, and their moments, by weighted means, where they lie. Collective.

    Args:
        num_rows: How many rows the table has.
        own: Returns what this rank has touched in some ranges of ids: in how many steps, and rows as ``tensors`` has.
        tensors: The rows that lie here, and their moments.
        weights: What each rank counts for. A row that ranks of weight 0 alone have touched stays as it is.
    """
    for ranges in _ranges_at_once(num_rows, tensors):
        ranks, _ = to_owners(num_rows, own(ranges))
        counting = [(rows, weight) for rows, weight in zip(ranks, weights, strict=True) if weight > 0]
        ids = torch.cat([rows.ids for rows, _ in counting]).unique()
        for tensor, mean in zip(tensors, means_of(ids, counting, tensors), strict=True):
            tensor.index_copy_(0, ids, mean)


def _ranges_at_once(num_rows: int, tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges of ids whose rows are sent at once, one of each owner: the same on all ranks."""
    owners = [*pairwise(bounds_of(num_rows, collectives.world_size()))]
    row_bytes = sum(each.element_size() * math.prod(each.shape[1:]) for each in tensors)
    longest = max(last - first for first, last in owners)
    for start, stop in pieces_of(0, longest, row_bytes * len(owners)):
        yield [(min(first + start, last), min(first + stop, last)) for first, last in owners]


@torch.no_grad()
def sum_at_owners(ranks: Sequence[Rows], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids among the rows that lie here, each once, and the sums of what ranks have sent for them."""
    ids, places = torch.cat([rows.ids for rows in ranks]).unique(return_inverse=True)
    total = like.new_zeros((len(ids), *like.shape[1:]))
    start = 0
    for rows in ranks:
        total.index_add_(0, places[start : start + len(rows.ids)], rows.values[0])
        start += len(rows.ids)
    return ids, total


def refuse_product(gradient: Tensor | None) -> None:
    """Refuse a dense gradient of the rows that lie here."""
    if gradient is not None and not gradient.is_sparse:
        raise ValueError(
            "The weight of an OwnedEmbedding has a dense gradient, and a rank has some of its rows alone, so that a "
            "product with it is not one with the whole table: look rows up by their ids alone."
        )
