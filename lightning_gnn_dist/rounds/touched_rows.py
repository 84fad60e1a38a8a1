r"""The tables of replicas that train apart: which rows a rank has touched in a round, and their means at a meeting.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.tables.merging` has the formula). A row that nobody has touched stays where it
is, on all ranks alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.means.averaging import AveragedMoments
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.tables.merging import mean_rows, take_rows_, weights_of_ranks
from lightning_gnn_dist.tables.tables import coalesced, refuse_other_sparse
from lightning_gnn_dist.wire import collectives


class DenseGradients(Part):
    """Refuses sparse gradients, but of tables whose rows live with one rank each: nobody counts the rows."""

    def before_step(self, optimizer: Optimizer) -> None:
        held = (each for group in optimizer.param_groups for each in group["params"])
        refuse_other_sparse(held, self.fit.ids_of_tables())


class TouchedRows(DenseGradients):
    """Counts touched rows, and puts them together when ranks meet.

    Args:
        moments: The moments of the optimizers that are put together, too.
    """

    def __init__(self, moments: AveragedMoments | None) -> None:
        self._moments = moments

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        # By the table's name, for each row, how many local steps of this round have touched it.
        self._steps = {
            name: torch.zeros(len(table), dtype=torch.int32, device=table.device) for name, table in fit.tables.items()
        }

    def begin_round(self) -> None:
        for steps in self._steps.values():
            steps.zero_()

    def before_step(self, optimizer: Optimizer) -> None:
        """Note which rows the optimizer is about to move; refuse a table whose gradient has all of them."""
        super().before_step(optimizer)
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, table in self.fit.tables.items():
            gradient = coalesced(table, name) if id(table) in held and table.requires_grad else None
            if gradient is not None:
                self._steps[name][gradient._indices()[0]] += 1

    @torch.no_grad()
    def contribute(self) -> None:
        """Replace each touched row, and its averaged moments, by the weighted mean over ranks.

        A rank of weight 0 takes the rows of others. Some rank's weight must be positive.
        """
        if collectives.world_size() == 1:
            return
        # Also of tables that were frozen in this round.
        tables = [[table.detach(), *self._moments_of(table)] for table in self.fit.tables.values()]
        weight = 0.0 if self.fit.round.is_left_out else self.fit.weight_of_rows()
        weights = weights_of_ranks(weight, tables[0][0].device)
        collectives.check_total(sum(weights))
        found, left = mean_rows(tables, [*self._steps.values()], weights)
        for tensors, rows in zip(tables, found, strict=True):
            for tensor, mean in zip(tensors, rows.values, strict=True):
                tensor.index_copy_(0, rows.ids, mean)
        source = next(rank for rank, each in enumerate(weights) if each > 0)
        for tensors, ids in zip(tables, left, strict=True):
            if len(ids):  # on all ranks alike: touched by ranks without weight alone, so the others have it as it was
                take_rows_(tensors, [ids] * len(tensors), source)

    def sizes(self) -> list[int]:
        return [sum(moment.numel() for table in self._trained() for moment in self._moments_of(table))]

    def equal(self) -> list[Tensor]:
        return [each for table in self._trained() for each in (table.data, *self._moments_of(table))]

    def _trained(self) -> list[Tensor]:
        return [table for table in self.fit.tables.values() if table.requires_grad]

    def _moments_of(self, table: Tensor) -> list[Tensor]:
        return [] if self._moments is None else self._moments.of_rows(table)
