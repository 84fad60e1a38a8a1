r"""Learned rows of nodes as a hook of the meeting: which a replica has touched in a round, and their means.

A row that a rank has touched in :math:`k_{p,i}` local steps of the round counts for :math:`a_{p,i} = w_p k_{p,i}`
there, with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has
moved it (:mod:`~lightning_gnn_dist.extensions.tables.exchange` has the formula). A row that nobody has touched stays
where it is, on all ranks alike. So do its moments, where ranks average them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.exchange import mean_at_all_, mean_at_owners_, weights_of_ranks
from lightning_gnn_dist.extensions.tables.lazy_adam import LazyAdam
from lightning_gnn_dist.extensions.tables.replica_rows import ReplicaRows, check_lasting
from lightning_gnn_dist.extensions.tables.row_owners import RowOwners
from lightning_gnn_dist.extensions.tables.table import Table, coalesced, holds
from lightning_gnn_dist.rounds.means import optimizer_tensors
from lightning_gnn_dist.rounds.meeting import MeetingCallback
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups
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


class LearnedRows(MeetingHook):
    """The rows of all tables: those that every rank has, and those with owners, of which replicas train copies.

    Args:
        tables: The tables, trained or not.
        owners: The ranks that own rows of some; None where nobody does.
        averages: Whether a moment of the optimizers is put together, too, by its name.

    Attributes:
        replicas: What this rank's replica has of tables with owners, in a fit.
    """

    def __init__(self, tables: Sequence[Table], owners: RowOwners | None, averages: Callable[[str], bool]) -> None:
        self._tables, self._owners, self._averages = tables, owners, averages
        self._counted: list[CountedRows] = []
        self.replicas: list[ReplicaRows] = []

    def begin(self, fit: Fit) -> None:
        """Begin a fit, in which rows with owners lie apart from what trains."""
        super().begin(fit)
        self._counted = [CountedRows(table) for table in self._tables if table.embedding is None]
        self.replicas = [
            ReplicaRows(table.embedding, fit.optimizers, self._averages, lambda: fit.round.is_training)
            for table in self._tables
            if table.embedding is not None
        ]
        for replica in self.replicas:
            replica.begin()

    def begin_round(self) -> None:
        callbacks = self.fit.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if self.replicas and not any(isinstance(each, MeetingCallback) for each in callbacks):
            raise ValueError(
                "A Tuner searches without the callback that hands an OwnedEmbedding its rows at each step: use "
                "nn.Embedding(..., sparse=True) for the search."
            )
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
        for replica in self.replicas:
            mean_at_owners_(replica.table.num_embeddings, replica.touched, replica.owned_tensors(), weights)
            replica.forget_round()
        if self._owners is not None:
            self._owners.has_changed()
        return {}

    def apply(self) -> None:
        if self.fit.round.is_left_out:
            for replica in self.replicas:
                replica.forget_moments()

    def sizes(self) -> list[int]:
        for replica in self.replicas:
            replica.begin_state()
        sizes = [moment.numel() for table in self._trained() for moment in self._moments_of(table)]
        sizes += [len(replica.averaged) * replica.parameter.numel() for replica in self.replicas]
        return [sum(sizes)]

    def trained(self) -> list[Tensor]:
        return [replica.trained() for replica in self.replicas if replica.parameter.requires_grad]

    def equal(self) -> list[Tensor]:
        return [each for table in self._trained() for each in (table.data, *self._moments_of(table))]

    def end(self) -> None:
        """End the fit. What a checkpoint has is still there."""
        for replica in self.replicas:
            replica.end()

    def state(self) -> dict[str, Any]:
        states = [replica.lasting() for replica in self.replicas]
        return {"rows": states} if any(state["starts"] for state in states) else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "rows" in state:
            check_lasting(state["rows"], len(self.replicas))
            for replica, of_table in zip(self.replicas, state["rows"], strict=True):
                replica.take_lasting(of_table)

    def _all(self) -> list[CountedRows | ReplicaRows]:
        return [*self._counted, *self.replicas]

    def _trained(self) -> list[nn.Parameter]:
        return [each.parameter for each in self._counted if each.parameter.requires_grad]

    def _moments_of(self, table: Tensor) -> list[Tensor]:
        """Return the moments of a table that are put together, and have a row for each of its own."""
        holders = [each for each in self.fit.optimizers if holds(each, table)]
        if any(map(self._averages, ("exp_avg", "exp_avg_sq"))):
            for optimizer in holders:
                if isinstance(optimizer, LazyAdam):
                    optimizer.begin_state(table)  # another rank may have touched rows where this one has none
        found = optimizer_tensors(holders, self._averages, [table])
        return [each for each in found if each.shape == table.shape]
