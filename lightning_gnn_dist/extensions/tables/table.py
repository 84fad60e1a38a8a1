"""Which parameters of a module are tables, of which a step touches some rows; and what tables cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding, owned_tables
from lightning_gnn_dist.rounds.sparse_gradients import check_sparse

KINDS = (nn.Embedding, nn.EmbeddingBag, OwnedEmbedding)  # that can be tables
# Optimizers of torch that raise where a gradient is sparse.
_DENSE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "ASGD", "Rprop")


@dataclass(frozen=True)
class Table:
    """A table: the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True``, or of an OwnedEmbedding.

    Attributes:
        name: The weight's name in the model.
        weight: The parameter that optimizers hold.
        embedding: The module, where each rank has some of the rows; None where every rank has all of them.
    """

    name: str
    weight: nn.Parameter
    embedding: OwnedEmbedding | None


def tables_of(module: nn.Module) -> list[Table]:
    """Return the tables of a module, trained or frozen, each once, in the same order on every rank."""
    found: dict[int, Table] = {}
    for name, child in module.named_modules():
        if isinstance(child, KINDS) and child.sparse:
            owned = child if isinstance(child, OwnedEmbedding) and child.owners is not None else None
            weight = child.parameter if isinstance(child, OwnedEmbedding) else child.weight
            assert isinstance(weight, nn.Parameter)
            found.setdefault(id(weight), Table(f"{name}.weight" if name else "weight", weight, owned))
    return [*found.values()]


def check_tables(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse tables that no exchange of rows keeps equal, and optimizers that do not take their gradients."""
    for name, child in module.named_modules():
        if isinstance(child, KINDS) and child.sparse and child.max_norm is not None:
            raise ValueError(
                f"{name} has sparse=True and max_norm={child.max_norm}, which changes rows in every forward, also in "
                "a validation, where no rank hears of it: leave max_norm out."
            )
    tables = {id(table.weight): table.name for table in tables_of(module) if table.weight.requires_grad}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = [tables[id(each)] for each in group["params"] if id(each) in tables]
            if held:
                _check_group(held[0], optimizer, group)


def refuse_owned(module: nn.Module, strategy: str) -> None:
    """Refuse tables of which each rank has a part, for a strategy that cannot train them."""
    if tables := owned_tables(module):
        raise ValueError(
            f"{next(iter(tables))} is an OwnedEmbedding, whose rows live with one rank each, and {strategy} trains "
            f"replicas that hold all: use GrappaStrategy(), or nn.Embedding(..., sparse=True) where every rank has the "
            "memory for it."
        )


def _check_group(name: str, optimizer: Optimizer, group: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, tuple(getattr(torch.optim, name) for name in _DENSE)):
        raise ValueError(
            f"{name} has sparse gradients, and torch's {kind} takes none: use "
            "LazyAdam(self.parameters(), lr=...) of lightning_gnn_dist, torch.optim.SGD without momentum, or "
            "torch.optim.Adagrad."
        )
    own = '{"params": self.rows.parameters(), '
    if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
        raise ValueError(
            f"{name} has sparse gradients, and SGD with momentum={group['momentum']} would go on moving rows that no "
            f'step touches: give it a group of its own, {own}"momentum": 0.0}}, or use LazyAdam.'
        )
    if group.get("weight_decay"):
        raise ValueError(
            f"{name} has sparse gradients, and with weight_decay={group['weight_decay']} rows that no step touches "
            f'would have to decay, too: give it a group of its own, {own}"weight_decay": 0.0}}.'
        )


def holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer steps a parameter."""
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])


def coalesced(table: Tensor, name: str) -> Tensor | None:
    """Return the gradient of a table with each touched row once, and put it in its place; refuse a dense one."""
    gradient = table.grad
    if gradient is None:
        return None
    check_sparse(gradient, name)
    if not gradient.is_coalesced():
        table.grad = gradient = gradient.coalesce()
    return gradient


def touched(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids and the values of the rows that a coalesced gradient has."""
    return gradient._indices()[0], gradient._values()
