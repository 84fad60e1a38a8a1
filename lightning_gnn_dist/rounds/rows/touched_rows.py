r"""The tables of replicas that train apart: which rows a rank has touched in a round, and their means at a meeting.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.rounds.rows.merging` has the formula). A row that nobody has touched stays where it
is, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.lightning_internals import module_of
from lightning_gnn_dist.rounds.rows.merging import (
    Rows,
    all_gather_touched,
    ids_of_all,
    short,
    take_rows_,
    weights_of_ranks,
)
from lightning_gnn_dist.rounds.rows.tables import coalesced, refuse_other_sparse, tables_of
from lightning_gnn_dist.wire import collectives


class KnowsMoments(Protocol):
    """Who says which moments are averaged beside a table."""

    def of_rows(self, table: Tensor) -> list[Tensor]:
        """Return the averaged moments that have a row for each of the table's."""


class TouchedRows:
    """Counts touched rows, and puts them together when ranks meet.

    Args:
        strategy: The strategy whose module has the tables.
        moments: Says which moments of the optimizers are put together, too.
    """

    def __init__(self, strategy: Strategy, moments: KnowsMoments) -> None:
        self._strategy, self._moments = strategy, moments
        # By the table's name, for each row, how many local steps of this round have touched it.
        self._steps: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a fit. No row is touched: checkpoints that can be resumed are of meetings."""
        self._steps = {}

    def count(self, optimizer: Optimizer) -> None:
        """Note which rows the optimizer is about to move; refuse a table whose gradient has all of them."""
        tables = tables_of(module_of(self._strategy))
        held = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        refuse_other_sparse(held.values(), tables.values())
        for name, table in tables.items():
            gradient = coalesced(table, name) if id(table) in held else None
            if gradient is not None:
                self._counter(name, table)[gradient._indices()[0]] += 1

    @torch.no_grad()
    def average_(self, weight: float) -> None:
        """Replace each touched row, and its averaged moments, by the weighted mean over ranks. Collective.

        Args:
            weight: What this rank counts for. With 0, it takes the rows of others. Some rank's must be positive.
        """
        named = tables_of(module_of(self._strategy), frozen=True)  # also those that were frozen in this round
        if not named or collectives.world_size() == 1:
            return
        counters = [self._counter(name, table) for name, table in named.items()]
        tables = [[table.detach(), *self._moments.of_rows(table)] for table in named.values()]
        weights = weights_of_ranks(weight, tables[0][0].device)
        collectives.check_total(sum(weights))
        own = [_touched(steps, tensors) for steps, tensors in zip(counters, tables, strict=True)]
        found, _ = all_gather_touched(own)
        left = [_merge_(tensors, ranks, weights) for tensors, ranks in zip(tables, found, strict=True)]
        source = next(rank for rank, each in enumerate(weights) if each > 0)
        for tensors, ids in zip(tables, left, strict=True):
            if len(ids):  # on all ranks alike: touched by ranks without weight alone, so the others have it as it was
                take_rows_(tensors, [ids] * len(tensors), source)
        for steps in counters:
            steps.zero_()

    def _counter(self, name: str, table: Tensor) -> Tensor:
        if name not in self._steps:
            self._steps[name] = torch.zeros(len(table), dtype=torch.int32, device=table.device)
        return self._steps[name]


def _touched(steps: Tensor, tensors: Sequence[Tensor]) -> Rows:
    ids = steps.nonzero().flatten()
    return Rows(short(ids, tensors[0]), [steps[ids], *(tensor[ids] for tensor in tensors)])


def _merge_(tensors: Sequence[Tensor], ranks: list[Rows], weights: Sequence[float]) -> Tensor:
    """Put the means into the tensors; return the ids of the rows that ranks without weight alone have touched."""
    ids = ids_of_all(ranks)
    places = [torch.searchsorted(ids, rows.ids) for rows in ranks]
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for rows, place, weight in zip(ranks, places, weights, strict=True):
        total.index_add_(0, place, weight * rows.values[0].double())
    counts = total > 0
    for number, tensor in enumerate(tensors, start=1):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = torch.zeros((len(ids), *tensor.shape[1:]), dtype=dtype, device=tensor.device)
        for rows, place, weight in zip(ranks, places, weights, strict=True):
            if weight > 0:  # else they may be NaN
                share = (weight * rows.values[0].double() / total[place]).to(dtype)
                mean.index_add_(0, place, share[:, None] * rows.values[number].to(dtype))
        tensor.index_copy_(0, ids[counts], mean[counts].to(tensor.dtype))
    return ids[~counts]
