r"""The gradients of tables, of which ranks exchange the rows that they have touched: their mean over ranks.

With :math:`g_{p,i}` the gradient of row :math:`i` on rank :math:`p`, and the terms added in the order of ranks,

.. math::
    g_i = \frac{1}{P} \sum_p g_{p,i}, \qquad\text{in a correction}\qquad g_i = \sum_p \frac{n_p}{\sum_q n_q} g_{p,i}.

Of a table that every rank has, all get it; of an :class:`OwnedEmbedding` the owner of the row, which steps it alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.tables.exchange import (
    TouchedRows,
    ids_of,
    sums_of,
    to_all,
    to_owners,
    weights_of_ranks,
)
from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding, refuse_product
from lightning_gnn_dist.extensions.tables.row_owners import RowOwners
from lightning_gnn_dist.extensions.tables.table import Table, coalesced, touched
from lightning_gnn_dist.rounds.sparse_gradients import no_rows, of_rows
from lightning_gnn_dist.wire import collectives


class TableGradients:
    """Exchanges gradients of tables at every step, beside torch's DDP, which leaves them alone.

    DDP would divide all other gradients by the number of ranks once more. Make it before DDP wraps the module; all
    ranks take rank 0's tables. Collective.

    Args:
        tables: The module's, trained or not.
        owners: The ranks that own rows of some; None where nobody does.

    Attributes:
        of_all: The weights of trained tables that every rank has.
    """

    def __init__(self, tables: Sequence[Table], owners: RowOwners | None) -> None:
        self._owners = owners
        self._owned = [table.embedding for table in tables if table.embedding is not None]
        self._of_all = [table for table in tables if table.embedding is None and table.weight.requires_grad]
        self.of_all = [table.weight for table in self._of_all]
        collectives.broadcast_([weight.data for weight in self.of_all])

    def begin_batch(self) -> None:
        """Note that a batch begins on all ranks, whether or not the optimizer has stepped after the one before."""
        if self._owners is not None:
            self._owners.trains, self._owners.is_stepping = True, False

    @torch.no_grad()
    def exchange(self, *, steps_next: bool) -> bool:
        """Replace the gradients by the mean over ranks; where no rank has one, there is none. Collective.

        Args:
            steps_next: Whether the optimizer steps next, before which rows are not looked up.

        Returns whether those are finite that lie on one rank each.
        """
        if (size := collectives.world_size()) == 1:
            return True
        gradients = [coalesced(table.weight, table.name) for table in self._of_all]
        for table, total in zip(self._of_all, _sums(self._of_all, gradients), strict=True):
            table.weight.grad = None if total is None else _divided(total, size)
        are_finite = [_hand_to_owners(table) for table in self._owned]  # all of them, whatever is found in the first
        if self._owners is not None and steps_next:
            self._owners.is_stepping = True
        return all(are_finite)


def _sums(tables: Sequence[Table], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the sums over ranks of gradients of tables that every rank has; None where no rank has one.

    Collective, if there are any.
    """
    if not tables:
        return []
    weights = [table.weight for table in tables]
    found = [no_rows(weight) if each is None else each for weight, each in zip(weights, gradients, strict=True)]
    own = [TouchedRows(ids, [values]) for ids, values in map(touched, found)]
    merged, ranks = to_all(weights, own, sums_of, [int(each is not None) for each in gradients])
    has_any = [any(flags) for flags in zip(*ranks, strict=True)]
    sums = zip(weights, merged, has_any, strict=True)
    return [of_rows(weight, touches.ids, total) if has else None for weight, (touches, (total,)), has in sums]


def _divided(gradient: Tensor, number: int) -> Tensor:
    gradient._values().div_(number)
    return gradient


def _sum_here(parameter: Tensor, ranks: Sequence[TouchedRows]) -> Tensor:
    """Return as a gradient the sums of what ranks have sent for the rows that lie here."""
    ids = ids_of(ranks)
    return of_rows(parameter, ids, *sums_of(ids, ranks))


def _hand_to_owners(table: OwnedEmbedding) -> bool:
    """Give a table the gradient of the rows that lie here; return whether all ranks' are finite. Collective."""
    parameter = table.parameter
    refuse_product(parameter.grad)
    ids, rows, has_any = _summed(table)
    flags = [int(has_any), int(bool(rows.isfinite().all()))]
    came, ranks = to_owners(table.num_embeddings, TouchedRows(ids, [rows]), flags)
    if any(has_any for has_any, _ in ranks):
        gradient = _divided(_sum_here(parameter, came), len(came))
        # There is one where a backward by hand comes before the step of another.
        parameter.grad = gradient if parameter.grad is None else (parameter.grad + gradient).coalesce()
    are_finite = all(is_finite for _, is_finite in ranks)
    if not are_finite:  # so that mixed precision skips the step on all ranks or on none
        parameter.grad = _not_finite(parameter, torch.inf)
    return are_finite


def _summed(table: OwnedEmbedding) -> tuple[Tensor, Tensor, bool]:
    """Return ids, each once and increasing, and the sums of the gradients of their rows here; whether there are any."""
    taken, like = table.take_gradients(), table.parameter.data
    if not taken:
        return torch.empty(0, dtype=torch.int64, device=like.device), like[:0], False
    if len(taken) == 1:
        return *taken[0], True
    ids, places = torch.cat([ids for ids, _ in taken]).unique(return_inverse=True)
    return ids, like.new_zeros((len(ids), like.shape[1])).index_add_(0, places, torch.cat([g for _, g in taken])), True


def _not_finite(like: Tensor, value: float) -> Tensor:
    """Return a gradient whose one row is infinite or NaN, also on a rank that has no rows."""
    ids = torch.zeros(1, dtype=torch.int64, device=like.device)
    return of_rows(like, ids, like.new_full((1, like.shape[1]), value, layout=torch.strided))


@torch.no_grad()
def mean_gradients(tables: Sequence[Table], gradients: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return the weighted means over ranks of coalesced gradients: of owned tables those of the rows here. Collective.

    Where a number of the latter is not finite, wherever it lies, all ranks get one that is not.
    """
    share = weight / sum(weights_of_ranks(weight, gradients[0].device))
    sums: list[Tensor | None] = []
    for each in gradients:
        ids, values = touched(each)
        sums.append(of_rows(each, ids, values * share))
    for is_owned, sum_over_ranks in ((False, _sums), (True, _sums_at_owners)):
        places = [place for place, table in enumerate(tables) if (table.embedding is not None) is is_owned]
        found = sum_over_ranks([tables[place] for place in places], [sums[place] for place in places])
        for place, total in zip(places, found, strict=True):
            sums[place] = total
    return [each for each in sums if each is not None]


def _sums_at_owners(tables: Sequence[Table], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the sums over ranks of gradients of tables whose rows have owners. Collective, if there are any."""
    if not tables:
        return []
    found = []
    for table, gradient in zip(tables, gradients, strict=True):
        assert table.embedding is not None and gradient is not None
        ids, values = touched(gradient)
        ranks, _ = to_owners(table.embedding.num_embeddings, TouchedRows(ids, [values]))
        found.append(_sum_here(table.embedding.here, ranks))
    bad = torch.tensor([float(not all(bool(each._values().isfinite().all()) for each in found))], device=values.device)
    collectives.sum_(bad)
    return [_not_finite(each, torch.nan) for each in found] if bad.item() else found
