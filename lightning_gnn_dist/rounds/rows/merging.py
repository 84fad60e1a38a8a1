r"""Rows of tables that ranks have touched, put together. Only those rows travel, with their ids.

Of replicas the mean, of gradients the sum. With :math:`\theta_{p,i}` row :math:`i` on rank :math:`p`, and
:math:`a_{p,i}` what it counts for,

.. math::
    \theta_i \leftarrow \sum_p \frac{a_{p,i}}{\sum_q a_{q,i}}\, \theta_{p,i}, \qquad g_i \leftarrow \sum_p g_{p,i}

A row that one rank alone has touched is that rank's, to the bit. Terms are added in the order of ranks, so that all
ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.rounds.rows.tables import no_rows, of_rows, touched
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.pieces import all_gather_pieces

_MOST_SHORT = 2**31 - 1  # the largest id of four bytes


class Rows(NamedTuple):
    """Some rows of one table, and of tensors that have a row for each of the table's.

    Attributes:
        ids: Which rows: each once, increasing.
        values: For each tensor, these rows. All ranks have the same tensors.
    """

    ids: Tensor
    values: list[Tensor]


def all_gather_touched(
    of_tables: Sequence[Rows], flags: Sequence[int] = ()
) -> tuple[list[list[Rows]], list[list[int]]]:
    """Return for each table the rows of each rank, and the flags of each rank. Collective.

    A row takes four bytes for its id (eight in a table of more than 2**31 rows), and those of its values.
    """
    pieces = [torch.tensor(flags, dtype=torch.int32, device=of_tables[0].ids.device)]
    for rows in of_tables:
        pieces += [rows.ids, *rows.values]
    found, whats = [list[Rows]() for _ in of_tables], []
    for theirs in all_gather_pieces(pieces):
        whats.append(theirs[0].tolist())
        start = 1
        for ranks, own in zip(found, of_tables, strict=True):
            ids, *values = theirs[start : start + 1 + len(own.values)]
            ranks.append(Rows(ids.long(), values))
            start += 1 + len(own.values)
    return found, whats


def short(ids: Tensor, table: Tensor) -> Tensor:
    """Return ids of rows of a table as they travel."""
    return ids.int() if len(table) <= _MOST_SHORT else ids


def ids_of_all(ranks: Iterable[Rows]) -> Tensor:
    """Return the ids that any rank has: each once, increasing."""
    found: Tensor = torch.cat([rows.ids for rows in ranks]).unique()
    return found


@torch.no_grad()
def sum_gradients(tables: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of sparse gradients over ranks; None where no rank has one. Collective.

    Args:
        tables: The tables, the same on all ranks.
        gradients: Of each table this rank's gradient, coalesced. None counts as one without rows.
    """
    own = []
    for table, gradient in zip(tables, gradients, strict=True):
        ids, values = touched(no_rows(table) if gradient is None else gradient)
        own.append(Rows(short(ids, table), [values]))
    found, whats = all_gather_touched(own, [int(gradient is not None) for gradient in gradients])
    has_any = [any(flags) for flags in zip(*whats, strict=True)]
    sums = zip(tables, found, has_any, strict=True)
    return [_summed(table, ranks) if has else None for table, ranks, has in sums]


def _summed(table: Tensor, ranks: list[Rows]) -> Tensor:
    ids = ids_of_all(ranks)
    total = ranks[0].values[0].new_zeros((len(ids), *table.shape[1:]))
    for rows in ranks:
        total.index_add_(0, torch.searchsorted(ids, rows.ids), rows.values[0])
    return of_rows(table, ids, total)


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
    own = []
    for table, which in zip(tables, ids, strict=True):
        mine = which if collectives.rank() == source else which[:0]
        own.append(Rows(short(mine, table), [table.detach()[mine]]))
    for table, ranks in zip(tables, all_gather_touched(own)[0], strict=True):
        for rows in ranks:
            table.detach().index_copy_(0, rows.ids, rows.values[0])
