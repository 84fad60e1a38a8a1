"""Gradients that have some rows of a weight alone, and the rows themselves; what has such rows is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces

_MOST_SHORT = 2**31 - 1  # the largest number of four bytes


def check_sparse(gradient: Tensor, name: str) -> None:
    """Refuse a dense gradient of a table."""
    if not gradient.is_sparse:
        raise ValueError(
            f"{name} has a dense gradient, though its sparse=True says that a step touches some rows: something uses "
            "the whole table, as a product with it does. Look rows up by their ids alone, or make it with sparse=False."
        )


def of_rows(table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return a gradient of a table that has these rows, each once and by increasing id."""
    options = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(ids[None], values, table.shape, **options)  # type: ignore[arg-type]


def no_rows(table: Tensor) -> Tensor:
    """Return a gradient of a table that has no rows."""
    ids = torch.empty(0, dtype=torch.int64, device=table.device)
    return of_rows(table, ids, torch.empty((0, *table.shape[1:]), dtype=table.dtype, device=table.device))


def short(places: Tensor, num_rows: int) -> Tensor:
    """Return places of rows of a table with so many as they travel."""
    return places.int() if num_rows <= _MOST_SHORT else places


@torch.no_grad()
def take_rows_(tables: Sequence[Tensor], ids: Sequence[Tensor], source: int) -> None:
    """Replace rows of tables, in place, by those of rank ``source``, whose ids count. Collective."""
    pieces = []
    for table, which in zip(tables, ids, strict=True):
        mine = which if collectives.rank() == source else which[:0]
        pieces += [short(mine, len(table)), table.detach()[mine]]
    theirs = iter(all_gather_pieces(pieces)[source])
    for table in tables:
        table.detach().index_copy_(0, next(theirs).long(), next(theirs))
