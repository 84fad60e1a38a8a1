"""The tables of a strategy's module whose rows live with one rank each: divided at the start, whole in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gnn_dist.tables.owned_embedding import OwnedEmbedding, divide, owned_tables, rows_here_alone
from lightning_gnn_dist.tables.row_owners import Moments, RowOwners


class Ownership:
    """Who owns the rows of each :class:`OwnedEmbedding` of a module: nobody, where it has none or one process has all.

    Attributes:
        owners: The ranks, from :meth:`divide` until they leave. They may outlive the strategy.
    """

    def __init__(self) -> None:
        self.owners: RowOwners | None = None
        self.tables: list[OwnedEmbedding] = []

    def divide(self, module: LightningModule, device: torch.device, moments: Moments) -> None:
        """Let each rank own some rows, unless it does. Collective.

        Args:
            module: What has the tables.
            device: Where it is.
            moments: A method that returns what others may ask for beside the rows of a parameter that lie here.
        """
        tables = [*owned_tables(module).values()]
        self.owners = divide(tables, device)
        self.tables = [] if self.owners is None else tables
        if self.owners is not None:
            held = WeakMethod(moments)  # owners may outlive the strategy
            self.owners.keep_moments(lambda parameter: {} if (call := held()) is None else call(parameter))

    def parameters(self) -> set[int]:
        """Return the weights of these tables, by ``id()``."""
        return {id(table.parameter) for table in self.tables}

    def state_of(self, module: LightningModule, get: Callable[[], dict[str, Any]], *, is_alone: bool) -> dict[str, Any]:
        """Return the state of a module from ``get``: with rows that lie here, or, for a rank that is alone, none."""
        with rows_here_alone():
            state = get()
        if is_alone:
            names = [f"{name}.weight" for name in owned_tables(module)]
            rank_zero_warn(f"This checkpoint lacks {', '.join(names)}, whose rows lie on ranks that may have ended.")
            for name in names:
                state.pop(name, None)
        return state

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
            for table in self.tables if gathers else []:
                table.gather()
            self.owners.close()
        self.owners, self.tables = None, []


def refuse_copies(module: LightningModule, callbacks: list[Any]) -> None:
    """Refuse callbacks that copy a module with such tables."""
    found = [each for each in callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
    if found and (tables := owned_tables(module)):
        raise ValueError(
            f"{type(found[0]).__name__} keeps a copy of all weights, and of {next(iter(tables))}, an OwnedEmbedding, "
            "each rank has some rows: leave it out, or use nn.Embedding(..., sparse=True)."
        )
