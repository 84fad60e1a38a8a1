"""The tables of a strategy of rounds of which each rank holds a part: what happens to all of them at once.

The law is that of tables that every rank holds (:mod:`~lightning_gnn_dist.rounds.rows.touched_rows`): a meeting makes
of each row, and of its averaged moments, the mean of the replicas, each counting the local steps that have touched it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.rows.merging import weights_of_ranks
from lightning_gnn_dist.rounds.rows.owned_embedding import OwnedEmbedding
from lightning_gnn_dist.rounds.rows.owned_exchange import mean_at_owners_
from lightning_gnn_dist.rounds.rows.owned_moments import Entry, with_entries
from lightning_gnn_dist.rounds.rows.replica_rows import ReplicaRows
from lightning_gnn_dist.rounds.rows.row_owners import RowOwners
from lightning_gnn_dist.wire import collectives


class HasOptimizers(Protocol):
    """What is read of a strategy."""

    @property
    def optimizers(self) -> list[Optimizer]: ...


class ReplicaTables:
    """What this rank's replica has of such tables. Without any, nothing is done.

    Args:
        strategy: Whose optimizers step the tables.
        averages: Whether ranks put together the moments of a name.
    """

    def __init__(self, strategy: HasOptimizers, averages: Callable[[str], bool]) -> None:
        self._strategy, self._averages = strategy, averages
        self._replicas: list[ReplicaRows] = []
        self._owners: RowOwners | None = None

    def take(self, tables: Sequence[OwnedEmbedding], owners: RowOwners | None) -> None:
        """Train these tables from now on; forget those of an earlier fit."""
        self._owners = owners
        self._replicas = [] if owners is None else [ReplicaRows(each, self._averages) for each in tables]

    @property
    def tables(self) -> list[OwnedEmbedding]:
        """Those that train."""
        return [replica.table for replica in self._replicas]

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the averaged moments of the rows that lie here, given what has these rows."""
        return next((each.moments for each in self._replicas if each.table.here is parameter), {})

    # A fit.

    def begin(self) -> None:
        """Begin a fit, in which rows lie apart from what trains; the optimizers are made."""
        for replica in self._replicas:
            replica.begin(self._holder(replica))

    def begin_training(self) -> None:
        """Begin with the rows of the owners, also where a search of the learning rate was here before."""
        for replica in self._replicas:
            replica.end_round()
            replica.forget_round()

    def end(self) -> None:
        """End the fit. What a checkpoint has is still there."""
        for replica in self._replicas:
            replica.end()

    def begin_round(self) -> None:
        """Keep rows that are looked up for a gradient; called for every batch."""
        for replica in self._replicas:
            replica.begin_round()

    def end_round(self) -> None:
        """Let lookups ask the owners again; before a meeting."""
        for replica in self._replicas:
            replica.end_round()
            holder = self._holder(replica)
            if holder is not None:
                replica.begin_state(holder)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Give an optimizer the rows that it is about to move."""
        for replica in self._replicas:
            if _holds(optimizer, replica.parameter):
                replica.begin_step(optimizer)

    def end_step(self) -> None:
        """Take them back, moved or not."""
        for replica in self._replicas:
            replica.end_step()

    # A meeting.

    def num_values(self) -> int:
        """Return a number that ranks with other moments have otherwise."""
        return sum(len(replica.averaged) * replica.parameter.numel() for replica in self._replicas)

    def weights_here(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters, in the place of tables the rows that this replica has trained in the round."""
        held = self._by_parameter
        return [held[id(each)].trained() if id(each) in held else each for each in parameters]

    @torch.no_grad()
    def average_(self, weight: float) -> None:
        """Let owners replace the rows that ranks have touched by their weighted mean. Collective.

        Args:
            weight: What this rank counts for. Some rank's must be positive.
        """
        if not self._replicas:
            return
        weights = weights_of_ranks(weight, self._replicas[0].held.device)
        collectives.check_total(sum(weights))
        for replica in self._replicas:
            mean_at_owners_(replica.table.num_embeddings, replica.touched, replica.owned_tensors(), weights)
            replica.forget_round()
        self.have_changed()

    def have_changed(self) -> None:
        """Note that owners have other rows, on all ranks alike."""
        if self._replicas and self._owners is not None:
            self._owners.has_changed()

    def forget_moments(self) -> None:
        """Zero moments that stay with this rank, where they are not finite."""
        for replica in self._replicas:
            replica.forget_moments()

    @contextmanager
    def in_own_form(self) -> Iterator[None]:
        """In the block, parameters and optimizers have the rows that lie here, which may step there."""
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(replica.in_own_form(self._holder(replica)))
            yield

    # A checkpoint.

    def whole_state(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer with the averaged moments of all ranks, which it asks for."""

        def whole(parameter: nn.Parameter, entry: Entry) -> Entry:
            replica = self._by_parameter.get(id(parameter))
            return entry if replica is None else entry | replica.whole_moments()

        return with_entries(state, optimizer, whole)

    def without_whole(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return states without what :meth:`whole_state` has added, which a checkpoint has once."""

        def without(parameter: nn.Parameter, entry: Entry) -> Entry:
            replica = self._by_parameter.get(id(parameter))
            return (
                entry
                if replica is None
                else {name: each for name, each in entry.items() if name not in replica.moments}
            )

        pairs = zip(states, self._strategy.optimizers, strict=False)
        return [with_entries(state, optimizer, without) for state, optimizer in pairs]

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

    def lasting(self) -> list[dict[str, Any]]:
        """Return what a checkpoint must hold of the moments that stay with this rank: for each table, if any has."""
        states = [replica.lasting() for replica in self._replicas]
        return states if any(state["starts"] for state in states) else []

    def take_lasting(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what :meth:`lasting` returned."""
        if len(states) != len(self._replicas):
            raise ValueError(
                f"The checkpoint has moments of {len(states)} OwnedEmbedding(s) on several ranks, and this fit trains "
                f"{len(self._replicas)}: resume with the tables that it was written with, or start from its weights "
                "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
            )
        for replica, state in zip(self._replicas, states, strict=True):
            replica.take_lasting(state)

    @property
    def _by_parameter(self) -> dict[int, ReplicaRows]:
        return {id(replica.parameter): replica for replica in self._replicas}

    def _holder(self, replica: ReplicaRows) -> Optimizer | None:
        """Return the optimizer that has a table; refuse a second one."""
        holders = [each for each in self._strategy.optimizers if _holds(each, replica.parameter)]
        if len(holders) > 1:
            raise ValueError(
                "Two optimizers hold the weight of one OwnedEmbedding, whose moments go with its rows from rank to "
                "rank: give it to one of them."
            )
        return holders[0] if holders else None


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])
