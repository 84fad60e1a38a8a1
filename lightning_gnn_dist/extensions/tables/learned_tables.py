r"""The tables of a strategy's module: whose rows they are, and their moments, which a checkpoint has whole.

A moment is what an optimizer's state has for each row of a table: Adam's running means are moments, its number of steps
is none. Of a table of which each rank has some rows, rank 0 asks for those of all to write a checkpoint, and each rank
takes its own from one.

In rounds, a row that a rank has touched in :math:`k_{p,i}` local steps counts for :math:`a_{p,i} = w_p k_{p,i}` there,
with :math:`w_p` the weight of the rank: a plain mean over ranks would keep 1/P of the way that one rank has moved it
(:mod:`~lightning_gnn_dist.extensions.tables.touched_rows` has the formula). A row that nobody has touched stays where
it is, on all ranks alike. So do its moments, where ranks average them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.lazy_adam import LazyAdam
from lightning_gnn_dist.extensions.tables.owned_embedding import (
    OwnedEmbedding,
    RowOwners,
    asking_nobody,
    divide,
    owned_tables,
)
from lightning_gnn_dist.extensions.tables.touched_rows import (
    Table,
    check_tables,
    clip_sparse_gradients,
    coalesced,
    give_back_clipping,
    holds,
    mean_at_all_,
    mean_at_each_step_,
    mean_gradients_,
    refuse_owned,
    tables_of,
    weights_of_ranks,
)
from lightning_gnn_dist.rounds.means import optimizer_tensors
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook, ReplicaState
from lightning_gnn_dist.rounds.reducer import Groups
from lightning_gnn_dist.wire import collectives


class LearnedTables(ReplicaState):
    """The tables of a module, for a call of the trainer.

    Args:
        module: What has them.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._all: list[Table] = []  # trained or not, once they are divided
        self._owners: RowOwners | None = None  # of rows of some tables, until they leave; they may outlive this
        self._optimizers: Sequence[Optimizer] = []  # of the fit
        self._precision: Precision | None = None
        self._exchanges = False  # gradients, at each step of the fit

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if any(table.weight.requires_grad for table in self._all):
            check_tables(self._module, optimizers)

    def refuse_replicas(self, what: str) -> None:
        refuse_owned(self._module, what)

    def divide(self, device: torch.device) -> None:
        """Let each rank own some rows of each :class:`OwnedEmbedding`, unless it does. Collective."""
        self._owners = divide(owned_tables(self._module).values(), device)
        self._all = tables_of(self._module)
        if self._owners is not None:
            moments = WeakMethod(self._moments)
            self._owners.moments = lambda rows: {} if (call := moments()) is None else call(rows)

    def excluded(self) -> set[str]:
        owned = owned_tables(self._module).items()
        return {f"{name}.weight" if name else "weight" for name, table in owned if table.owners is not None}

    def rows(self) -> dict[int, str]:
        return {id(table.weight): table.name for table in tables_of(self._module)}

    def begin_fit(self, optimizers: Sequence[Optimizer], precision: Precision) -> None:
        self._optimizers, self._precision = optimizers, precision
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        found = [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
        if found and self._owned:
            name = next(iter(owned_tables(self._module)))
            raise ValueError(
                f"{type(found[0]).__name__} keeps a copy of all weights, and of {name}, an "
                "OwnedEmbedding, each rank has some rows: leave it out, or use nn.Embedding(..., sparse=True)."
            )
        self.check_optimizers(optimizers)
        clip_sparse_gradients(precision, self._owned)
        for table in self._owned:
            table.take_gradients()  # of an earlier fit

    def have_changed(self) -> None:
        if self._owners is not None:
            self._owners.has_changed()

    def leave(self, *, at_once: bool, stays: bool, gathers: bool) -> None:
        """End a fit or an evaluation; after it, ranks that go on may still ask each other for rows."""
        if self._precision is not None:
            give_back_clipping(self._precision)
        if self._owners is None:
            return
        self._owners.trains = False
        if at_once:
            self._owners.abort()
        elif stays:
            return
        else:
            for table in self._owned if gathers else []:
                table.gather()
            self._owners.close()
        self._owners, self._all = None, []

    @property
    def _owned(self) -> list[OwnedEmbedding]:
        """The tables of which each rank has some rows."""
        return [table.embedding for table in self._all if table.embedding is not None]

    @property
    def _of_all(self) -> list[Table]:
        """The trained tables that every rank has."""
        return [table for table in self._all if table.embedding is None and table.weight.requires_grad]

    # In rounds.

    def hooks(self, averages: Callable[[str], bool]) -> Sequence[MeetingHook]:
        return [LearnedRows(self._all, averages)]

    def average_gradients_(self, parameters: Sequence[Tensor], gradients: list[Tensor], weight: float) -> None:
        by_id = {id(table.weight): table for table in self._all}
        if held := [(place, by_id[id(each)]) for place, each in enumerate(parameters) if id(each) in by_id]:
            mean_gradients_(held, gradients, weight)

    # Where ranks exchange gradients at every step.

    def begin_exchange(self, strategy: str, *, has_others: bool) -> None:
        trained = [table.name for table in self._all if table.weight.requires_grad]
        if trained and not has_others:
            others = "" if self._owned else "use LocalSGDStrategy, or "
            raise ValueError(
                f"{', '.join(trained)} is all that trains, and {strategy} needs a parameter with dense gradients, too: "
                f"{others}add a layer."
            )
        self._exchanges = True
        collectives.broadcast_([table.weight.data for table in self._of_all])

    def begin_batch(self) -> None:
        if self._owners is not None:
            self._owners.trains, self._owners.is_stepping = True, False

    def exchange_gradients(self, *, steps_next: bool) -> bool:
        if not self._exchanges or collectives.world_size() == 1:
            return True
        are_finite = mean_at_each_step_(self._of_all, self._owned)
        if self._owners is not None and steps_next:
            self._owners.is_stepping = True  # rows are not looked up before the step
        return are_finite

    # In checkpoints.

    @property
    def maps_files(self) -> bool:  # type: ignore[override]
        return bool(owned_tables(self._module))

    def model_state(self, get: Callable[[], dict[str, Any]], *, is_alone: bool) -> dict[str, Any]:
        """Return the state of the module from ``get``: with rows that lie here, or, for a rank that is alone, none."""
        if self._owners is None:
            return get()
        with asking_nobody():
            state = get()
        if is_alone:
            names = sorted(self.excluded())
            rank_zero_warn(f"This checkpoint lacks {', '.join(names)}, whose rows lie on ranks that may have ended.")
            for name in names:
                state.pop(name, None)
        return state

    def optimizer_state(self, get: Callable[[], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer from ``get``, with the rows of all ranks. Not collective."""
        return self._with_moments(get(), optimizer, _whole)

    def own_states(self, states: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return states of optimizers with the rows that lie here, of such with all rows."""
        pairs = zip(states, self._optimizers, strict=False)
        return [self._with_moments(*pair, _own) for pair in pairs] if self._owned else states

    def _with_moments(
        self, state: dict[str, Any], optimizer: Optimizer, taken: Callable[[OwnedEmbedding, str, Tensor], Tensor]
    ) -> dict[str, Any]:
        """Return the state of an optimizer with other moments of tables of which each rank has some rows."""
        owned, entries = {id(table.parameter): table for table in self._owned}, {**state["state"]}
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if (table := owned.get(id(parameter))) is not None and number in entries:
                entries[number] = {
                    name: taken(table, name, each) if isinstance(each, Tensor) and each.dim() else each
                    for name, each in entries[number].items()
                }
        return {**state, "state": entries}

    def _moments(self, rows: Tensor) -> dict[str, Any]:
        """Return the moments that others may ask for, given what has the rows that lie here."""
        return next((each.state[rows] for each in self._optimizers if rows in each.state), {})


def _whole(table: OwnedEmbedding, name: str, own: Tensor) -> Tensor:
    assert table.owners is not None
    return table.owners.whole(table.number, own, name) if len(own) == len(table.parameter) else own


def _own(table: OwnedEmbedding, _: str, whole: Tensor) -> Tensor:
    first, last = table.rows_of_rank
    return whole[first:last].clone() if len(whole) == table.num_embeddings else whole


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
