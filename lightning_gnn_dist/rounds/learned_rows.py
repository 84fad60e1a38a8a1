r"""Learned rows of nodes as a part of the meeting: which a replica has touched in a round, and their means.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.tables.exchange` has the formula). A row that nobody has touched stays where it is,
on all ranks alike. So do its moments, where ranks average them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.means.averaging import AveragedMoments
from lightning_gnn_dist.rounds.means.reducer import Groups
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.tables.exchange import mean_at_all_, mean_at_owners_, weights_of_ranks
from lightning_gnn_dist.tables.replica_rows import ReplicaRows, check_lasting
from lightning_gnn_dist.tables.table import Table, coalesced, holds
from lightning_gnn_dist.wire import collectives


class CountedRows:
    """A table that this rank has whole, and how many local steps of the round have touched each of its rows."""

    def __init__(self, table: Table) -> None:
        self.name, self.parameter = table.name, table.weight
        self.steps = torch.zeros(len(table.weight), dtype=torch.int32, device=table.weight.device)

    def begin_step(self, _: Optimizer) -> None:
        """Note which rows the optimizer is about to move; refuse a gradient that has all of them."""
        gradient = coalesced(self.parameter, self.name) if self.parameter.requires_grad else None
        if gradient is not None:
            self.steps[gradient._indices()[0]] += 1

    def end_step(self) -> None:
        """Nothing to take back."""

    def forget_round(self) -> None:
        """Begin to count anew."""
        self.steps.zero_()


class LearnedRows(Part):
    """The rows of all tables: those that every rank has, and those with owners, of which replicas train copies.

    Args:
        moments: The moments of the optimizers that are put together, too.
    """

    def __init__(self, moments: AveragedMoments | None) -> None:
        self._moments = moments
        self._counted: list[CountedRows] = []
        self._replicas: list[ReplicaRows] = []

    def begin(self, fit: Fit) -> None:
        """Begin a fit, in which rows with owners lie apart from what trains."""
        super().begin(fit)
        assert fit.tables is not None
        self._counted = [CountedRows(table) for table in fit.tables.all if table.embedding is None]
        self._replicas = fit.tables.replicas = [
            ReplicaRows(each, fit.optimizers, self._averages, lambda: fit.round.is_training)
            for each in fit.tables.owned
        ]
        for replica in self._replicas:
            replica.begin()

    def begin_round(self) -> None:
        for each in self._all():
            each.forget_round()  # also where a search of the learning rate was here before

    def before_step(self, optimizer: Optimizer) -> None:
        """Note which rows an optimizer is about to move, and give it those that it has not."""
        for each in self._all():
            if holds(optimizer, each.parameter):
                each.begin_step(optimizer)

    def after_step(self) -> None:
        """Take them back, moved or not."""
        for each in self._all():
            each.end_step()

    @torch.no_grad()
    def contribute(self) -> Groups:
        """Replace each touched row, and its averaged moments, by the weighted mean over ranks.

        A rank of weight 0 takes the rows of others. Some rank's weight must be positive.
        """
        if collectives.world_size() == 1:
            return {}
        weights = weights_of_ranks(0.0 if self.fit.round.is_left_out else self.fit.weight_of_rows(), self.fit.device)
        if self._counted:  # also those that were frozen in this round
            tables = [[each.parameter.detach(), *self._moments_of(each.parameter)] for each in self._counted]
            mean_at_all_(tables, [each.steps for each in self._counted], weights)
        for replica in self._replicas:
            mean_at_owners_(replica.table.num_embeddings, replica.touched, replica.owned_tensors(), weights)
            replica.forget_round()
        assert self.fit.tables is not None
        self.fit.tables.have_changed()
        return {}

    def apply(self) -> None:
        if self.fit.round.is_left_out:
            for replica in self._replicas:
                replica.forget_moments()

    def sizes(self) -> list[int]:
        for replica in self._replicas:
            replica.begin_state()
        sizes = [moment.numel() for table in self._trained() for moment in self._moments_of(table)]
        sizes += [len(replica.averaged) * replica.parameter.numel() for replica in self._replicas]
        return [sum(sizes)]

    def trained(self) -> list[Tensor]:
        return [replica.trained() for replica in self._replicas if replica.parameter.requires_grad]

    def equal(self) -> list[Tensor]:
        return [each for table in self._trained() for each in (table.data, *self._moments_of(table))]

    def end(self) -> None:
        """End the fit. What a checkpoint has is still there."""
        for replica in self._replicas:
            replica.end()

    def state(self) -> dict[str, Any]:
        states = [replica.lasting() for replica in self._replicas]
        return {"rows": states} if any(state["starts"] for state in states) else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "rows" in state:
            check_lasting(state["rows"], len(self._replicas))
            for replica, of_table in zip(self._replicas, state["rows"], strict=True):
                replica.take_lasting(of_table)

    def _all(self) -> list[CountedRows | ReplicaRows]:
        return [*self._counted, *self._replicas]

    def _trained(self) -> list[nn.Parameter]:
        return [each.parameter for each in self._counted if each.parameter.requires_grad]

    def _moments_of(self, table: Tensor) -> list[Tensor]:
        return [] if self._moments is None else self._moments.of_rows(table)

    def _averages(self, name: str) -> bool:
        return self._moments is not None and self._moments.has(name)
