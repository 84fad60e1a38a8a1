"""The tables of a strategy of rounds of which each rank holds a part: what happens to all of them at once.

The law is that of tables that every rank holds (:mod:`~lightning_gnn_dist.rounds.touched_rows`): a meeting makes
of each row, and of its averaged moments, the mean of the replicas, each counting the local steps that have touched it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.means.averaging import AveragedMoments
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.rounds.replica_state import holds
from lightning_gnn_dist.tables.merging import weights_of_ranks
from lightning_gnn_dist.tables.owned_exchange import mean_at_owners_
from lightning_gnn_dist.tables.owned_moments import Entry, with_entries
from lightning_gnn_dist.tables.replica_rows import ReplicaRows
from lightning_gnn_dist.wire import collectives


class ReplicaTables(Part):
    """What this rank's replica has of such tables.

    Args:
        moments: The moments that ranks put together.
    """

    def __init__(self, moments: AveragedMoments | None) -> None:
        self._moments = moments
        self._replicas: list[ReplicaRows] = []

    def begin(self, fit: Fit) -> None:
        """Begin a fit, in which rows lie apart from what trains."""
        super().begin(fit)
        self._replicas = [ReplicaRows(each, self._averages, lambda: fit.round.is_training) for each in fit.owned]
        for replica in self._replicas:
            replica.begin(self._holder(replica))

    def begin_round(self) -> None:
        for replica in self._replicas:
            replica.forget_round()  # also where a search of the learning rate was here before

    def before_step(self, optimizer: Optimizer) -> None:
        """Give an optimizer the rows that it is about to move."""
        for replica in self._replicas:
            if holds(optimizer, replica.parameter):
                replica.begin_step(optimizer)

    def after_step(self) -> None:
        """Take them back, moved or not."""
        for replica in self._replicas:
            replica.end_step()

    @torch.no_grad()
    def contribute(self) -> None:
        """Let owners replace the rows that ranks have touched by their weighted mean: some weight must be positive."""
        weight = 0.0 if self.fit.round.is_left_out else self.fit.weight_of_rows()
        weights = weights_of_ranks(weight, self._replicas[0].held.device)
        collectives.check_total(sum(weights))
        for replica in self._replicas:
            mean_at_owners_(replica.table.num_embeddings, replica.touched, replica.owned_tensors(), weights)
            replica.forget_round()
        self.have_changed()

    def apply(self) -> None:
        if self.fit.round.is_left_out:
            for replica in self._replicas:
                replica.forget_moments()

    def sizes(self) -> list[int]:
        for replica in self._replicas:
            if (holder := self._holder(replica)) is not None:
                replica.begin_state(holder)
        return [sum(len(replica.averaged) * replica.parameter.numel() for replica in self._replicas)]

    def trained(self) -> list[Tensor]:
        return [replica.trained() for replica in self._replicas if replica.parameter.requires_grad]

    def end(self) -> None:
        """End the fit. What a checkpoint has is still there."""
        for replica in self._replicas:
            replica.end()

    # What a correction needs.

    def have_changed(self) -> None:
        """Note that owners have other rows, on all ranks alike."""
        assert self.fit.owned[0].owners is not None
        self.fit.owned[0].owners.has_changed()

    @contextmanager
    def in_own_form(self) -> Iterator[None]:
        """In the block, parameters and optimizers have the rows that lie here, which may step there."""
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(replica.in_own_form(self._holder(replica)))
            yield

    # A checkpoint.

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the averaged moments of the rows that lie here, given what has these rows."""
        return next((each.moments for each in self._replicas if each.table.here is parameter), {})

    def own_states(self, states: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Take the moments that this rank needs from states with all rows; return the states without them."""

        def own(parameter: nn.Parameter, entry: Entry) -> Entry:
            replica = self._by_parameter.get(id(parameter))
            if replica is None:
                return entry
            shape = parameter.shape
            rows = {name: each for name, each in entry.items() if isinstance(each, Tensor) and each.shape == shape}
            replica.forget_all_moments()
            replica.take_moments(rows)
            return {name: each for name, each in entry.items() if name not in rows}

        pairs = zip(states, optimizers, strict=False)
        return [with_entries(state, optimizer, own) for state, optimizer in pairs]

    def state(self) -> dict[str, Any]:
        states = [replica.lasting() for replica in self._replicas]
        return {"rows": states} if any(state["starts"] for state in states) else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "rows" in state:
            check_lasting(state["rows"], len(self._replicas))
            for replica, of_table in zip(self._replicas, state["rows"], strict=True):
                replica.take_lasting(of_table)

    def _averages(self, name: str) -> bool:
        return self._moments is not None and self._moments.has(name)

    @property
    def _by_parameter(self) -> dict[int, ReplicaRows]:
        return {id(replica.parameter): replica for replica in self._replicas}

    def _holder(self, replica: ReplicaRows) -> Optimizer | None:
        """Return the optimizer that has a table; refuse a second one."""
        holders = [each for each in self.fit.optimizers if holds(each, replica.parameter)]
        if len(holders) > 1:
            raise ValueError(
                "Two optimizers hold the weight of one OwnedEmbedding, whose moments go with its rows from rank to "
                "rank: give it to one of them."
            )
        return holders[0] if holders else None


def check_lasting(states: Sequence[object], num_tables: int) -> None:
    """Refuse moments of another number of tables."""
    if len(states) != num_tables:
        raise ValueError(
            f"The checkpoint has moments of {len(states)} OwnedEmbedding(s) on several ranks, and this fit trains "
            f"{num_tables}: resume with the tables that it was written with, or start from its weights "
            "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )
