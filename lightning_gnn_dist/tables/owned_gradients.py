r"""Gradients of rows that live with one rank each: every rank hands those of its batch to the rows' owners.

With :math:`g_{p,i}` the gradient of row :math:`i` on rank :math:`p`, its owner steps along

.. math::
    g_i = \frac{1}{P} \sum_p g_{p,i},

the terms added in the order of ranks, as for any parameter under DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.tables.merging import weights_of_ranks
from lightning_gnn_dist.tables.owned_embedding import OwnedEmbedding
from lightning_gnn_dist.tables.owned_exchange import refuse_product, sum_at_owners, to_owners
from lightning_gnn_dist.tables.tables import coalesced, of_rows, stand_ins, touched
from lightning_gnn_dist.tables.touches import Rows
from lightning_gnn_dist.wire import collectives

_CLIPS = "clip_grad_by_norm"  # of Lightning's precision


@torch.no_grad()
def hand_to_owners(tables: Iterable[OwnedEmbedding]) -> bool:
    """Give each table the gradient of the rows that lie here; return whether all ranks' are finite. Collective.

    Where no rank has a gradient of a table, it gets none.
    """
    are_finite = [_hand_to_owners(table) for table in tables]  # all of them, whatever is found in the first
    return all(are_finite)


def _hand_to_owners(table: OwnedEmbedding) -> bool:
    refuse_product(table.parameter.grad)
    ids, rows, has_any = _summed(table)
    flags = [int(has_any), int(bool(rows.isfinite().all()))]
    came, ranks = to_owners(table.num_embeddings, Rows(ids, [rows]), flags)
    if any(has_any for has_any, _ in ranks):
        _add(table.parameter, came)
    are_finite = all(is_finite for _, is_finite in ranks)
    if not are_finite:
        _spoil(table.parameter)
    return are_finite


def _summed(table: OwnedEmbedding) -> tuple[Tensor, Tensor, bool]:
    """Return ids, each once and increasing, and the sums of the gradients of their rows here; whether there are any."""
    taken, like = table.take_gradients(), table.parameter.data
    if not taken:
        return torch.empty(0, dtype=torch.int64, device=like.device), like[:0], False
    if len(taken) == 1:
        return *taken[0], True
    ids, places = torch.cat([ids for ids, _ in taken]).unique(return_inverse=True)
    return ids, like.new_zeros((len(ids), like.shape[1])).index_add_(0, places, torch.cat([g for _, g in taken])), True


def _add(parameter: nn.Parameter, came: Sequence[Rows]) -> None:
    """Add to the gradient of the rows that lie here the mean over ranks."""
    ids, total = sum_at_owners(came, parameter.data)
    gradient = of_rows(parameter, ids, total.div_(len(came)))
    # There is one where a backward by hand comes before the step of another.
    parameter.grad = gradient if parameter.grad is None else (parameter.grad + gradient).coalesce()


def _spoil(parameter: nn.Parameter) -> None:
    """Make the gradient of a row infinite, so that mixed precision skips the step on all ranks or on none."""
    ids = torch.arange(min(1, len(parameter)), device=parameter.device)
    parameter.grad = of_rows(parameter, ids, torch.full_like(parameter.data[: len(ids)], torch.inf))


@torch.no_grad()
def mean_at_owners(tables: Iterable[OwnedEmbedding], gradients: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Return the weighted means over ranks of coalesced gradients, of the rows that lie here alone. Collective.

    Where a number is not finite, wherever it lies, all ranks get one that is not.
    """
    total = sum(weights_of_ranks(weight, gradients[0].device))
    collectives.check_total(total)
    found = []
    for table, gradient in zip(tables, gradients, strict=True):
        ids, values = touched(gradient)
        ranks, _ = to_owners(table.num_embeddings, Rows(ids, [values * (weight / total)]))
        found.append(of_rows(table.here, *sum_at_owners(ranks, table.here.data)))
    bad = torch.tensor([float(not all(bool(each._values().isfinite().all()) for each in found))], device=values.device)
    collectives.sum_(bad)
    return [_spoiled(each) for each in found] if bad.item() else found


def _spoiled(gradient: Tensor) -> Tensor:
    values = gradient.new_full((1, gradient.shape[1]), torch.nan, layout=torch.strided)
    return of_rows(gradient, torch.zeros(1, dtype=torch.int64, device=gradient.device), values)


def clip_owned_gradients(precision: Precision, tables: Sequence[OwnedEmbedding]) -> None:
    """Let Lightning clip by a norm that counts each row once, whichever rank has it. Collective when it clips."""
    owned = {id(table.parameter) for table in tables}

    def clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        mine, others = ([each for each in held if (id(each) in owned) is which] for which in (True, False))
        found = [coalesced(each, "an OwnedEmbedding") for each in mine]
        values = [gradient._values() for gradient in found if gradient is not None]
        total = nn.utils.clip_grad_norm_([*stand_ins(others), *_norm_of_ranks(mine, values)], clip_val)
        for each in values:
            each.mul_((clip_val / (total + 1e-6)).clamp(max=1.0).to(each.dtype))  # as torch clips

    vars(precision)[_CLIPS] = clip_by_norm


@contextmanager
def norms_of_ranks(precision: Precision, tables: Sequence[OwnedEmbedding]) -> Iterator[None]:
    """Clip so in the block, where all ranks step along one gradient."""
    if tables:
        clip_owned_gradients(precision, tables)
    try:
        yield
    finally:
        give_back_norm(precision)


def give_back_norm(precision: Precision) -> None:
    """Undo :func:`clip_owned_gradients`."""
    vars(precision).pop(_CLIPS, None)


def _norm_of_ranks(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return what has as its gradient the norm of the rows of all ranks, for torch's clipping. Collective."""
    if not parameters:
        return []
    like = parameters[0].data
    square = sum((rows.double().square().sum() for rows in values), like.new_zeros((), dtype=torch.float64))
    norm = collectives.all_gather_rows(square).sum().sqrt()  # the same bits on all ranks
    stand_in = nn.Parameter(like.new_zeros(1), requires_grad=False)
    stand_in.grad = norm.to(like.dtype)[None]
    return [stand_in]
