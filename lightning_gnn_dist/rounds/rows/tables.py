"""Which parameters of a module are tables, of which a step touches some rows; and what tables cannot be."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.rows.owned_embedding import OwnedEmbedding, owned_tables

_KINDS = (nn.Embedding, nn.EmbeddingBag, OwnedEmbedding)  # that can be tables
# Optimizers of torch that raise where a gradient is sparse.
_DENSE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
OTHER_SPARSE = (
    "A parameter{} has a sparse gradient, and is no table that ranks know: look rows up in an "
    "nn.Embedding(..., sparse=True), or with sparse=False."
)


def tables_of(module: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Return the trained tables by name, in the same order on every rank, or also those that are ``frozen``.

    A table is the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True``, or of an
    :class:`OwnedEmbedding`.
    """
    if not any(isinstance(child, _KINDS) and child.sparse for child in module.modules()):
        return {}
    found: dict[Tensor, str] = {}
    for name, child in module.named_modules():
        if isinstance(child, _KINDS) and child.sparse:
            weight = child.parameter if isinstance(child, OwnedEmbedding) else child.weight
            if frozen or weight.requires_grad:
                found.setdefault(weight, f"{name}.weight" if name else "weight")
    return {name: weight for weight, name in found.items()}


def dense_parameters(module: nn.Module) -> list[Tensor]:
    """Return the trained parameters that are no tables, in the same order on every rank."""
    tables = {id(table) for table in tables_of(module).values()}
    return [each for each in module.parameters() if each.requires_grad and id(each) not in tables]


def check_tables(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse tables that no exchange of rows keeps equal, and optimizers that do not take their gradients."""
    for name, child in module.named_modules():
        if isinstance(child, _KINDS) and child.sparse and child.max_norm is not None:
            raise ValueError(
                f"{name} has sparse=True and max_norm={child.max_norm}, which changes rows in every forward, also in "
                "a validation, where no rank hears of it: leave max_norm out."
            )
    tables = {id(table): name for name, table in tables_of(module).items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held = [tables[id(each)] for each in group["params"] if id(each) in tables]
            if held:
                _check_group(held[0], optimizer, group)


def warn_of_dense_tables(module: nn.Module, num_rows: Container[int], num_ranks: int) -> None:
    """Warn of trained embeddings with dense gradients and a row for each of so many nodes."""
    for name, child in module.named_modules():
        is_one = isinstance(child, nn.Embedding) and not child.sparse and child.weight.requires_grad
        if is_one and child.num_embeddings in num_rows:
            rank_zero_warn(
                f"{name} has a row for each of {child.num_embeddings} nodes, and a mean of {num_ranks} ranks keeps "
                f"about 1/{num_ranks} of the way that one of them moves it: make it with sparse=True, and train with "
                "LazyAdam."
            )


def refuse_average_of_moments(module: nn.Module) -> None:
    """Refuse tables for a correction whose optimizer takes means of moments that ranks do not share otherwise."""
    if tables := tables_of(module):
        raise ValueError(
            f'Correction(optimizer="averaged") would average all moments of {next(iter(tables))}: add '
            'average_optimizer=True, which puts those of touched rows together, or use optimizer="persistent".'
        )


def refuse_elastic(module: nn.Module) -> None:
    """Refuse tables where ranks may die: a meeting that is held again averages whole parameters."""
    refuse_owned(module, "TMAStrategy(elastic=True)", "TMAStrategy() without elastic")
    if tables := tables_of(module):
        raise ValueError(
            f"{next(iter(tables))} has sparse gradients, and with elastic=True ranks average whole parameters: make it "
            "with sparse=False, or leave elastic out."
        )


def refuse_owned(module: nn.Module, strategy: str, way_out: str = "GrappaStrategy()") -> None:
    """Refuse tables of which each rank has a part, for a strategy that cannot train them."""
    if tables := owned_tables(module):
        raise ValueError(
            f"{next(iter(tables))} is an OwnedEmbedding, whose rows live with one rank each, and {strategy} trains "
            f"replicas that hold all: use {way_out}, or nn.Embedding(..., sparse=True) where every rank has the "
            "memory for it."
        )


def _check_group(name: str, optimizer: Optimizer, group: dict[str, Any]) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, _DENSE):
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


def refuse_other_sparse(parameters: Iterable[Tensor], tables: Container[int]) -> None:
    """Refuse sparse gradients of parameters whose ``id()`` is no table's, whose rows nobody counts."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse and id(parameter) not in tables:
            raise ValueError(OTHER_SPARSE.format(f" of shape {tuple(parameter.shape)}"))


def explain_other_sparse(exception: BaseException) -> None:
    """Replace what torch says where DDP meets a sparse gradient of a parameter that is no table."""
    if isinstance(exception, NotImplementedError) and "SparseTensorImpl" in str(exception):
        exception.args = (OTHER_SPARSE.format(""),)


def check_sparse(gradient: Tensor, name: str) -> None:
    """Refuse a dense gradient of a table."""
    if not gradient.is_sparse:
        raise ValueError(
            f"{name} has a dense gradient, though its sparse=True says that a step touches some rows: something uses "
            "the whole table, as a product with it does. Look rows up by their ids alone, or make it with sparse=False."
        )


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


def of_rows(table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Return a gradient of a table that has these rows, each once and by increasing id."""
    options = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(ids[None], values, table.shape, **options)  # type: ignore[arg-type]


def no_rows(table: Tensor) -> Tensor:
    """Return a gradient of a table that has no rows."""
    ids = torch.empty(0, dtype=torch.int64, device=table.device)
    return of_rows(table, ids, torch.empty((0, *table.shape[1:]), dtype=table.dtype, device=table.device))


def stand_ins(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield parameters for torch's clipping, which takes no sparse gradients: in their place, what has the values."""
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            yield parameter
            continue
        parameter.grad = parameter.grad.coalesce()
        values = parameter.grad._values()
        stand_in = nn.Parameter(torch.empty_like(values), requires_grad=False)
        stand_in.grad = values  # the same memory: what is clipped is the gradient's
        yield stand_in
