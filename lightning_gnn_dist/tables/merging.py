r"""Rows of tables that ranks have touched: their means and their sums.

Of replicas the mean, of gradients the sum. With :math:`\theta_{p,i}` row :math:`i` on rank :math:`p`, and
:math:`a_{p,i}` what it counts for,

.. math::
    \theta_i \leftarrow \sum_p \frac{a_{p,i}}{\sum_q a_{q,i}}\, \theta_{p,i}, \qquad g_i \leftarrow \sum_p g_{p,i}

A row that one rank alone has touched is that rank's, to the bit. Terms are added in the order of ranks, so that all
ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.tables.tables import no_rows, of_rows, touched
from lightning_gnn_dist.tables.touches import Rows, gather_touches, put_together, short
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.pieces import all_gather_pieces


@torch.no_grad()
def sum_gradients(tables: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of sparse gradients over ranks; None where no rank has one. Collective.

    Args:
        tables: The tables, the same on all ranks.
        gradients: Of each table this rank's gradient, coalesced. None counts as one without rows.
    """
    pairs = zip(tables, gradients, strict=True)
    own = [touched(no_rows(table) if gradient is None else gradient) for table, gradient in pairs]
    flags = [int(gradient is not None) for gradient in gradients]
    touches, whats = gather_touches(tables, [ids for ids, _ in own], flags)
    has_any = [any(flags) for flags in zip(*whats, strict=True)]
    sums = zip(tables, touches, put_together(touches, [[values] for _, values in own], _sum), has_any, strict=True)
    return [of_rows(table, each.ids, total) if has else None for table, each, (total,), has in sums]


def _sum(ids: Tensor, ranks: list[Rows]) -> list[Tensor]:
    like = ranks[0].values[0]
    total = like.new_zeros((len(ids), *like.shape[1:]))
    for rows in ranks:
        total.index_add_(0, torch.searchsorted(ids, rows.ids), rows.values[0])
    return [total]


@torch.no_grad()
def mean_rows(
    tables: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], weights: Sequence[float]
) -> tuple[list[Rows], list[Tensor]]:
    """Return for each table the means of the rows that count, and the ids of touched rows that do not. Collective.

    Args:
        tables: For each table, itself and what else has a row for each of its rows. All ranks have the same tensors.
        steps: For each table and each of its rows, how many local steps of this rank have touched it.
        weights: What each rank counts for. A row that ranks of weight 0 alone have touched does not count.
    """
    own = [counts.nonzero().flatten() for counts in steps]
    touches, _ = gather_touches([tensors[0] for tensors in tables], own)
    values = [
        [counts[ids], *(tensor[ids] for tensor in tensors)]
        for ids, counts, tensors in zip(own, steps, tables, strict=True)
    ]

    def mean(ids: Tensor, ranks: list[Rows]) -> list[Tensor]:
        counting = [
            (rows, weight) for rows, weight in zip(ranks, weights, strict=True) if weight > 0
        ]  # else NaN, perhaps
        return means_of(ids, counting, ranks[0].values[1:])

    made = put_together(touches, values, mean)
    found, left = [], []
    for each, tensors in zip(touches, made, strict=True):
        counts = each.touched_by([rank for rank, weight in enumerate(weights) if weight > 0])
        found.append(Rows(each.ids[counts], [tensor[counts] for tensor in tensors]))
        left.append(each.ids[~counts])
    return found, left


def means_of(ids: Tensor, ranks: Sequence[tuple[Rows, float]], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the means of rows, of which each counts as often as its rank has touched it, times the rank's weight."""
    places = [torch.searchsorted(ids, rows.ids) for rows, _ in ranks]
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for (rows, weight), place in zip(ranks, places, strict=True):
        total.index_add_(0, place, weight * rows.values[0].double())
    means = []
    for number, tensor in enumerate(like, start=1):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = torch.zeros((len(ids), *tensor.shape[1:]), dtype=dtype, device=ids.device)
        for (rows, weight), place in zip(ranks, places, strict=True):
            share = (weight * rows.values[0].double() / total[place]).to(dtype)
            mean.index_add_(0, place, share[:, None] * rows.values[number].to(dtype))
        means.append(mean.to(tensor.dtype))
    return means


@torch.no_grad()
def mean_gradients(gradients: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return the weighted means over ranks of coalesced sparse gradients. Collective."""
    total = sum(weights_of_ranks(weight, gradients[0].device))
    collectives.check_total(total)
    shares = [of_rows(each, each._indices()[0], each._values() * (weight / total)) for each in gradients]
    return [each for each in sum_gradients(gradients, shares) if each is not None]


def weights_of_ranks(weight: float, device: torch.device) -> list[float]:
    """Return what each rank counts for. Collective."""
    rows: list[float] = collectives.all_gather_rows(torch.tensor(weight, dtype=torch.float64, device=device)).tolist()
    return rows


@torch.no_grad()
def take_rows_(tables: Sequence[Tensor], ids: Sequence[Tensor], source: int) -> None:
    """Replace rows of tables, in place, by those of rank ``source``, whose ids count. Collective."""
    pieces = []
    for table, which in zip(tables, ids, strict=True):
        mine = which if collectives.rank() == source else which[:0]
        pieces += [short(mine, table), table.detach()[mine]]
    theirs = iter(all_gather_pieces(pieces)[source])
    for table in tables:
        table.detach().index_copy_(0, next(theirs).long(), next(theirs))
