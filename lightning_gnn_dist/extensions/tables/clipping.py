"""How Lightning clips sparse gradients, which torch's functions do not take, and of some rows other ranks have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding
from lightning_gnn_dist.extensions.tables.table import coalesced
from lightning_gnn_dist.wire import collectives

_CLIPS = "clip_grad_by_norm"  # Lightning's


def clip_sparse_gradients(precision: Precision) -> None:
    """Let Lightning clip sparse gradients beside dense ones, by norm and by value."""
    give_back_clipping(precision)
    parameters_of = precision.main_params
    precision.main_params = lambda optimizer: stand_ins(parameters_of(optimizer))  # type: ignore[method-assign]


def give_back_clipping(precision: Precision) -> None:
    """Undo :func:`clip_sparse_gradients`, and what counts the rows of other ranks in a norm."""
    vars(precision).pop("main_params", None)
    vars(precision).pop(_CLIPS, None)


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
