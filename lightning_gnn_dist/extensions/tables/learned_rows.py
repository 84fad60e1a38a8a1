r"""Learned rows of nodes as a hook of the meeting: which a replica has touched in a round, and their means.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.extensions.tables.exchange` has the formula). A row that nobody has touched stays
where it is, on all ranks alike. So do its moments, where ranks average them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.exchange import mean_at_all_, weights_of_ranks
from lightning_gnn_dist.extensions.tables.lazy_adam import LazyAdam
from lightning_gnn_dist.extensions.tables.table import Table, coalesced, holds
from lightning_gnn_dist.rounds.means import optimizer_tensors
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups
from lightning_gnn_dist.wire import collectives


class LearnedRows(MeetingHook):
    """The rows of all tables.

    Args:
        tables: The tables, trained or not.
        averages: Whether a moment of the optimizers is put together, too, by its name.
    """

    def __init__(self, tables: Sequence[Table], averages: Callable[[str], bool]) -> None:
        self._tables, self._averages = tables, averages
        self._steps: list[Tensor] = []  # of each table, how many local steps of the round have touched each row

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        weights = [table.weight for table in self._tables]
        self._steps = [torch.zeros(len(each), dtype=torch.int32, device=each.device) for each in weights]

    def begin_round(self) -> None:
        for steps in self._steps:
            steps.zero_()  # also where a search of the learning rate was here before

    def before_step(self, optimizer: Optimizer) -> None:
        """Note which rows an optimizer is about to move; refuse a gradient that has all of them."""
        for table, steps in zip(self._tables, self._steps, strict=True):
            if table.weight.requires_grad and holds(optimizer, table.weight):
                gradient = coalesced(table.weight, table.name)
                if gradient is not None:
                    steps[gradient._indices()[0]] += 1

    @torch.no_grad()
    def contribute(self) -> Groups:
        """Replace each touched row, and its averaged moments, by the weighted mean over ranks.

        A rank of weight 0 takes the rows of others. Some rank's weight must be positive.
        """
        if collectives.world_size() > 1:
            weight = 0.0 if self.fit.round.is_left_out else self.fit.weight_of_rows()
            tables = [table.weight for table in self._tables]  # also those that were frozen in this round
            with_moments = [[each.detach(), *self._moments_of(each)] for each in tables]
            mean_at_all_(with_moments, self._steps, weights_of_ranks(weight, self.fit.device))
        return {}

    def sizes(self) -> list[int]:
        return [sum(moment.numel() for table in self._trained() for moment in self._moments_of(table))]

    def equal(self) -> list[Tensor]:
        return [each for table in self._trained() for each in (table.data, *self._moments_of(table))]

    def _trained(self) -> list[Tensor]:
        return [table.weight for table in self._tables if table.weight.requires_grad]

    def _moments_of(self, table: Tensor) -> list[Tensor]:
        """Return the moments of a table that are put together, and have a row for each of its own."""
        holders = [each for each in self.fit.optimizers if holds(each, table)]
        if any(map(self._averages, ("exp_avg", "exp_avg_sq"))):
            for optimizer in holders:
                if isinstance(optimizer, LazyAdam):
                    optimizer.begin_state(table)  # another rank may have touched rows where this one has none
        found = optimizer_tensors(holders, self._averages, [table])
        return [each for each in found if each.shape == table.shape]
