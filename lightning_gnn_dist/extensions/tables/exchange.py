r"""Rows of tables that ranks have touched, on their way home, and what becomes of them there: a mean or a sum.

Of replicas the mean, of gradients the sum. With :math:`\theta_{p,i}` row :math:`i` on rank :math:`p`, and
:math:`a_{p,i}` what it counts for,

.. math::
    \theta_i \leftarrow \sum_p \frac{a_{p,i}}{\sum_q a_{q,i}}\, \theta_{p,i}, \qquad g_i \leftarrow \sum_p g_{p,i}

A row that one rank alone has touched is that rank's, to the bit. Terms are added in the order of ranks.

Each rank owns a range of rows. What ranks have touched of it goes to the owner, which puts it together: of a table that
has owners for good that is all, of one that every rank has the owners send what they have made to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.extensions.tables.row_owners import bounds_of
from lightning_gnn_dist.rounds.sparse_gradients import short, take_rows_
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces


class TouchedRows(NamedTuple):
    """Some rows of one table, and of tensors that have a row for each of the table's.

    Attributes:
        ids: Which rows: each once, increasing.
        values: For each tensor, these rows. All ranks have the same tensors.
    """

    ids: Tensor
    values: list[Tensor]


def ids_of(ranks: Iterable[TouchedRows]) -> Tensor:
    """Return the ids of the rows of all these ranks, each once and increasing."""
    ids: Tensor = torch.cat([rows.ids for rows in ranks]).unique()
    return ids


def sums_of(ranks: Sequence[TouchedRows]) -> TouchedRows:
    """Return the sums of rows over ranks."""
    ids, like = ids_of(ranks), ranks[0].values[0]
    total = like.new_zeros((len(ids), *like.shape[1:]))
    for rows in ranks:
        total.index_add_(0, torch.searchsorted(ids, rows.ids), rows.values[0])
    return TouchedRows(ids, [total])


def means_of(ranks: Sequence[TouchedRows], weights: Sequence[float]) -> TouchedRows:
    """Return the means of rows, of which each counts as often as its rank has touched it, times the rank's weight.

    The first of their values is how often. Ranks of weight 0 are left out, whose rows may be NaN.
    """
    counting = [(rows, weight) for rows, weight in zip(ranks, weights, strict=True) if weight > 0]
    ids = ids_of(rows for rows, _ in counting)
    places = [torch.searchsorted(ids, rows.ids) for rows, _ in counting]
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for (rows, weight), place in zip(counting, places, strict=True):
        total.index_add_(0, place, weight * rows.values[0].double())
    means = []
    for number, tensor in enumerate(ranks[0].values[1:], start=1):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = torch.zeros((len(ids), *tensor.shape[1:]), dtype=dtype, device=ids.device)
        for (rows, weight), place in zip(counting, places, strict=True):
            share = (weight * rows.values[0].double() / total[place]).to(dtype)
            mean.index_add_(0, place, share[:, None] * rows.values[number].to(dtype))
        means.append(mean.to(tensor.dtype))
    return TouchedRows(ids, means)


def weights_of_ranks(weight: float, device: torch.device) -> list[float]:
    """Return what each rank counts for; refuse that none does. Collective."""
    rows: list[float] = collectives.all_gather_rows(torch.tensor(weight, dtype=torch.float64, device=device)).tolist()
    collectives.check_total(sum(rows))
    return rows


@torch.no_grad()
def mean_at_all_(tables: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Replace rows that ranks have touched, and their moments, by weighted means, on all ranks. Collective.

    Args:
        tables: For each table, itself and its moments. All ranks have the same tensors.
        steps: For each table and each of its rows, how many local steps of this rank have touched it.
        weights: What each rank counts for. What ranks of weight 0 alone have touched becomes what others have.
    """
    own, num_rows = list[TouchedRows](), list(map(len, steps))
    for counts, tensors in zip(steps, tables, strict=True):
        ids = counts.nonzero().flatten()
        own.append(TouchedRows(ids, [counts[ids], *(tensor[ids] for tensor in tensors)]))
    came, _ = to_owners(num_rows, own)
    means = [means_of(of_ranks, weights) for of_ranks in came]
    every = [ids_of(of_ranks) for of_ranks in came]
    left = [TouchedRows(ids[~torch.isin(ids, mean.ids)], []) for ids, mean in zip(every, means, strict=True)]
    found = to_all([*num_rows, *num_rows], [*means, *left])
    for tensors, mean, others in zip(tables, found, found[len(tables) :], strict=False):
        for tensor, rows in zip(tensors, mean.values, strict=True):
            tensor.index_copy_(0, mean.ids, rows)
        if len(others.ids):  # on all ranks alike
            first = next(rank for rank, weight in enumerate(weights) if weight > 0)
            take_rows_(tensors, [others.ids] * len(tensors), first)


def to_owners(
    num_rows: Sequence[int], own: Sequence[TouchedRows], flags: Sequence[int] = ()
) -> tuple[list[list[TouchedRows]], list[list[int]]]:
    """Send rows of tables to their owners; return for each table those of each rank, and each rank's flags. Collective.

    Args:
        num_rows: How many rows each table has.
        own: What this rank sends of each, one table at least. All ranks have the same tensors.
        flags: Numbers of the caller's, as many on all ranks.
    """
    size, device, widths = collectives.world_size(), own[0].values[0].device, [1 + len(rows.values) for rows in own]
    ids, bounds = [sent(rows.ids, device) for rows in own], torch.tensor([bounds_of(each, size) for each in num_rows])
    cuts = map(torch.searchsorted, ids, sent(bounds, device))
    counts = torch.stack(list(cuts)).diff(dim=1).flatten()
    told = collectives.all_gather_rows(torch.cat([sent(torch.tensor([*flags]).long(), device), counts])).cpu()
    sizes = told[:, len(flags) :].view(size, len(own), size)  # of source, table and owner
    lengths = sizes.transpose(1, 2).repeat_interleave(torch.tensor(widths), 2).tolist()
    pieces = [
        each.split(of_owners)
        for of, rows, number, of_owners in zip(ids, own, num_rows, sizes[collectives.rank()].tolist(), strict=True)
        for each in (short(of, number), *rows.values)
    ]
    came = list(map(iter, exchange_pieces(list(zip(*pieces, strict=True)), lengths)))
    found = [[TouchedRows(next(of).long(), [next(of) for _ in rows.values]) for of in came] for rows in own]
    return found, told[:, : len(flags)].tolist()


def to_all(num_rows: Sequence[int], made: Sequence[TouchedRows]) -> list[TouchedRows]:
    """Return what all owners have made of their rows, of one table after the other. Collective."""
    pairs = zip(num_rows, made, strict=True)
    of_ranks = all_gather_pieces([each for number, rows in pairs for each in (short(rows.ids, number), *rows.values)])
    found = (torch.cat(pieces) for pieces in zip(*of_ranks, strict=True))
    return [TouchedRows(next(found).long(), [next(found) for _ in rows.values]) for rows in made]
