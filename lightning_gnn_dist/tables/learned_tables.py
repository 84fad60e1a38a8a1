"""The tables of a strategy's module: whose rows they are, and their moments, which a checkpoint has whole.

A moment is what an optimizer's state has for each row of a table: Adam's running means are moments, its number of steps
is none. Of a table of which each rank has some rows, rank 0 asks for those of all to write a checkpoint, and each rank
takes its own from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.tables.owned_embedding import OwnedEmbedding, divide, owned_tables, rows_here_alone
from lightning_gnn_dist.tables.replica_rows import ReplicaRows
from lightning_gnn_dist.tables.row_owners import RowOwners
from lightning_gnn_dist.tables.table import Table, check_tables, tables_of

Entry = dict[str, Any]  # an optimizer's state of one parameter
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class LearnedTables:
    """The tables of a module, for a call of the trainer.

    Args:
        module: What has them.

    Attributes:
        all: The tables, trained or not, once :meth:`divide` was called.
        owners: The ranks that own rows of some tables, until they leave; None where nobody does. They may outlive this.
        optimizers: Those of the fit.
        replicas: What this rank's replica has of tables with owners, in a fit of rounds.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.all: list[Table] = []
        self.owners: RowOwners | None = None
        self.optimizers: Sequence[Optimizer] = []
        self.replicas: list[ReplicaRows] = []

    def divide(self, device: torch.device) -> None:
        """Let each rank own some rows of each :class:`OwnedEmbedding`, unless it does. Collective."""
        self.owners = divide(owned_tables(self.module).values(), device)
        self.all = tables_of(self.module)
        if self.owners is not None:
            moments = WeakMethod(self._moments)
            self.owners.keep_moments(lambda rows: {} if (call := moments()) is None else call(rows))

    def begin_fit(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin a fit, whose optimizers are made; refuse such as do not take the gradients of tables."""
        self.optimizers = optimizers
        if self.trained():
            check_tables(self.module, optimizers)

    @property
    def owned(self) -> list[OwnedEmbedding]:
        """The tables of which each rank has some rows."""
        return [table.embedding for table in self.all if table.embedding is not None]

    def trained(self) -> list[Table]:
        """Return the tables that train now."""
        return [table for table in self.all if table.weight.requires_grad]

    def ids(self) -> set[int]:
        """Return the weights of all tables, by ``id()``."""
        return {id(table.weight) for table in self.all}

    def ids_of_owned(self) -> set[int]:
        """Return the weights of tables of which each rank has some rows, by ``id()``."""
        return {id(table.weight) for table in self.all if table.embedding is not None}

    def have_changed(self) -> None:
        """Note that owners have other rows, on all ranks alike."""
        if self.owners is not None:
            self.owners.has_changed()

    @contextmanager
    def in_own_form(self) -> Iterator[None]:
        """In the block, parameters and optimizers have the rows that lie here, which may step there."""
        with ExitStack() as stack:
            for replica in self.replicas:
                stack.enter_context(replica.in_own_form())
            yield

    def leave(self, *, at_once: bool, stays: bool, gathers: bool) -> None:
        """End a fit or an evaluation; after it, ranks that go on may still ask each other for rows.

        Args:
            at_once: Whether others may wait for what this rank does not do any more: then it waits for no other's end.
            stays: Whether this process goes on.
            gathers: Whether the process that started this one gets the model from it.
        """
        if self.owners is None:
            return
        self.owners.trains = False
        if at_once:
            self.owners.abort()
        elif stays:
            return
        else:
            for table in self.owned if gathers else []:
                table.gather()
            self.owners.close()
        self.owners, self.all = None, []

    # Checkpoints.

    def model_state(self, get: Callable[[], dict[str, Any]], *, is_alone: bool) -> dict[str, Any]:
        """Return the state of the module from ``get``: with rows that lie here, or, for a rank that is alone, none."""
        with rows_here_alone():
            state = get()
        if is_alone:
            names = [f"{name}.weight" for name in owned_tables(self.module)]
            rank_zero_warn(f"This checkpoint lacks {', '.join(names)}, whose rows lie on ranks that may have ended.")
            for name in names:
                state.pop(name, None)
        return state

    def optimizer_state(self, get: Callable[[], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer from ``get``, with the rows of all ranks. Not collective."""
        owned = {id(table.parameter): table for table in self.owned}

        def whole(parameter: nn.Parameter, entry: Entry) -> Entry:
            if (table := owned.get(id(parameter))) is None:
                return entry
            assert table.owners is not None
            moments = _with_rows(entry, len(parameter))
            return entry | {name: table.owners.whole(table.number, own, name) for name, own in moments.items()}

        with self.in_own_form():
            return _changed(get(), optimizer, whole)

    def own_states(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return states of optimizers with the rows that lie here, of such with all rows; replicas take theirs."""
        owned = {id(table.parameter): table for table in self.owned}
        replicas = {id(replica.parameter): replica for replica in self.replicas}

        def own(parameter: nn.Parameter, entry: Entry) -> Entry:
            if (table := owned.get(id(parameter))) is None:
                return entry
            moments = _with_rows(entry, table.num_embeddings)
            if (replica := replicas.get(id(parameter))) is not None:
                replica.take_moments(moments)
                return {name: each for name, each in entry.items() if name not in moments}
            first, last = table.rows_of_rank
            return entry | {name: whole[first:last].clone() for name, whole in moments.items()}

        return [_changed(*pair, own) for pair in zip(states, self.optimizers, strict=False)]

    def without_rows(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return states of optimizers without moments that a checkpoint has once."""
        owned = self.ids_of_owned()

        def without(parameter: nn.Parameter, entry: Entry) -> Entry:
            if id(parameter) not in owned:
                return entry
            return {name: each for name, each in entry.items() if not isinstance(each, Tensor) or not each.dim()}

        return [_changed(*pair, without) for pair in zip(states, self.optimizers, strict=False)]

    def _moments(self, rows: Tensor) -> dict[str, Any]:
        """Return the moments that others may ask for, given what has the rows that lie here."""
        for replica in self.replicas:
            if replica.table.here is rows:
                return {**replica.moments}
        return next((each.state[rows] for each in self.optimizers if rows in each.state), {})


def _with_rows(entry: Entry, number: int) -> dict[str, Tensor]:
    """Return what a parameter's state has so many rows of."""
    tensors = {name: each for name, each in entry.items() if isinstance(each, Tensor) and each.dim()}
    return {name: each for name, each in tensors.items() if len(each) == number}


def _changed(
    state: dict[str, Any], optimizer: Optimizer, change: Callable[[nn.Parameter, Entry], Entry]
) -> dict[str, Any]:
    """Return the state of an optimizer with other entries of its parameters; an empty one is left out."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    entries = {number: change(each, state["state"].get(number, {})) for number, each in enumerate(parameters)}
    return {**state, "state": {number: entry for number, entry in entries.items() if entry}}


@contextmanager
def hidden_from_ddp(module: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let DDP, and Lightning where it makes replicas equal, ignore some parameters of a module in the block."""
    hidden = {id(each) for each in parameters}
    ignored = [name for name, each in module.named_parameters(remove_duplicate=False) if id(each) in hidden]
    if ignored:
        vars(module)[_IGNORED] = ignored
    try:
        yield
    finally:
        vars(module).pop(_IGNORED, None)


def refuse_copies(module: LightningModule, callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that copy a module with tables whose rows have owners."""
    found = [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
    if found and (tables := owned_tables(module)):
        raise ValueError(
            f"{type(found[0]).__name__} keeps a copy of all weights, and of {next(iter(tables))}, an OwnedEmbedding, "
            "each rank has some rows: leave it out, or use nn.Embedding(..., sparse=True)."
        )
