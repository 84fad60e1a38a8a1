r"""The tables of replicas that train apart: which rows a rank has touched in a round, and their means at a meeting.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.rounds.rows.merging` has the formula). A row that nobody has touched stays where it
is, on all ranks alike.
"""

from __future__ import annotations

from typing import Protocol

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.lightning_internals import module_of
from lightning_gnn_dist.rounds.rows.merging import mean_rows, take_rows_, weights_of_ranks
from lightning_gnn_dist.rounds.rows.owned_embedding import owned_parameters
from lightning_gnn_dist.rounds.rows.tables import coalesced, refuse_other_sparse, tables_of
from lightning_gnn_dist.wire import collectives


class KnowsMoments(Protocol):
    """Who says which moments are averaged beside a table."""

    def of_rows(self, table: Tensor) -> list[Tensor]:
        """Return the averaged moments that have a row for each of the table's."""


class TouchedRows:
    """Counts touched rows, and puts them together when ranks meet.

    It leaves alone tables whose rows live with one rank each, which
    :class:`~lightning_gnn_dist.rounds.rows.replica_tables.ReplicaTables` has.

    Args:
        strategy: The strategy whose module has the tables.
        moments: Says which moments of the optimizers are put together, too.
    """

    def __init__(self, strategy: Strategy, moments: KnowsMoments) -> None:
        self._strategy, self._moments = strategy, moments
        # By the table's name, for each row, how many local steps of this round have touched it.
        self._steps: dict[str, Tensor] = {}
        self._has_none = False  # whether the module had no table at the first step of this round

    def begin(self) -> None:
        """Begin a fit. No row is touched: checkpoints that can be resumed are of meetings."""
        self._steps, self._has_none = {}, False

    def count(self, optimizer: Optimizer) -> None:
        """Note which rows the optimizer is about to move; refuse a table whose gradient has all of them."""
        held = {id(each): each for group in optimizer.param_groups for each in group["params"]}
        if self._has_none and not any(each.grad is not None and each.grad.is_sparse for each in held.values()):
            return
        module = module_of(self._strategy)
        tables, owned = tables_of(module), owned_parameters(module)
        self._has_none = not tables
        refuse_other_sparse(held.values(), tables.values())
        for name, table in tables.items():
            gradient = coalesced(table, name) if id(table) in held else None
            if gradient is not None and id(table) not in owned:
                self._counter(name, table)[gradient._indices()[0]] += 1

    @torch.no_grad()
    def average_(self, weight: float) -> None:
        """Replace each touched row, and its averaged moments, by the weighted mean over ranks. Collective.

        Args:
            weight: What this rank counts for. With 0, it takes the rows of others. Some rank's must be positive.
        """
        self._has_none = False
        module = module_of(self._strategy)
        owned = owned_parameters(module)
        named = tables_of(module, frozen=True)  # also those that were frozen in this round
        named = {name: table for name, table in named.items() if id(table) not in owned}
        if not named or collectives.world_size() == 1:
            return
        counters = [self._counter(name, table) for name, table in named.items()]
        tables = [[table.detach(), *self._moments.of_rows(table)] for table in named.values()]
        weights = weights_of_ranks(weight, tables[0][0].device)
        collectives.check_total(sum(weights))
        found, left = mean_rows(tables, counters, weights)
        for tensors, rows in zip(tables, found, strict=True):
            for tensor, mean in zip(tensors, rows.values, strict=True):
                tensor.index_copy_(0, rows.ids, mean)
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
