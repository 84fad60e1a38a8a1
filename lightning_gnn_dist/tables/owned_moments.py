"""The optimizer's state of tables that live with one rank each: whole in a checkpoint, in parts on the ranks.

What is as long as the table has a row for each of its rows: Adam's moments have, its number of steps has not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.tables.owned_embedding import OwnedEmbedding

Change = Callable[[OwnedEmbedding, str, Tensor], Tensor]
Entry = dict[str, Any]  # an optimizer's state of one parameter


def moments_of(parameter: Tensor, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the state that one of some optimizers has of a parameter."""
    return next((each.state[parameter] for each in optimizers if parameter in each.state), {})


def whole_state(state: dict[str, Any], optimizer: Optimizer, tables: Sequence[OwnedEmbedding]) -> dict[str, Any]:
    """Return the state of an optimizer with the rows of all ranks, asked for piece by piece. Not collective."""

    def whole(table: OwnedEmbedding, name: str, own: Tensor) -> Tensor:
        assert table.owners is not None
        return table.owners.whole(table.number, own, name) if len(own) == len(table.parameter) else own

    return _changed(state, optimizer, tables, whole)


def own_state(state: dict[str, Any], optimizer: Optimizer, tables: Sequence[OwnedEmbedding]) -> dict[str, Any]:
    """Return the state of an optimizer with the rows that lie here, of one with all rows."""

    def cut(table: OwnedEmbedding, name: str, whole: Tensor) -> Tensor:
        first, last = table.rows_of_rank
        return whole[first:last].clone() if len(whole) == table.num_embeddings else whole

    return _changed(state, optimizer, tables, cut)


def without_rows(
    states: Sequence[dict[str, Any]], optimizers: Sequence[Optimizer], tables: Container[int]
) -> list[dict[str, Any]]:
    """Return states without the rows of tables, by ``id()`` of their weights, which a checkpoint has once."""

    def without(parameter: nn.Parameter, entry: Entry) -> Entry:
        is_rows = id(parameter) in tables
        return {name: each for name, each in entry.items() if not (is_rows and isinstance(each, Tensor) and each.dim())}

    return [with_entries(state, optimizer, without) for state, optimizer in zip(states, optimizers, strict=False)]


def _changed(
    state: dict[str, Any], optimizer: Optimizer, tables: Sequence[OwnedEmbedding], change: Change
) -> dict[str, Any]:
    """Return a state in which the tensors of tables, but for single numbers, are others."""
    owned = {id(table.parameter): table for table in tables}

    def changed(parameter: nn.Parameter, entry: Entry) -> Entry:
        if (table := owned.get(id(parameter))) is None:
            return entry
        tensors = {name: each for name, each in entry.items() if isinstance(each, Tensor) and each.dim()}
        return entry | {name: change(table, name, each) for name, each in tensors.items()}

    return with_entries(state, optimizer, changed)


def with_entries(
    state: dict[str, Any], optimizer: Optimizer, change: Callable[[nn.Parameter, Entry], Entry]
) -> dict[str, Any]:
    """Return the state of an optimizer with other entries of its parameters; an empty one is left out."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    entries = {number: change(each, state["state"].get(number, {})) for number, each in enumerate(parameters)}
    return {**state, "state": {number: entry for number, entry in entries.items() if entry}}


def read_mapped(path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return a checkpoint whose tensors stay in its file until they are read."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return checkpoint
