r"""The gradients of tables, of which ranks exchange the rows that they have touched: their means, and clipping.

With :math:`g_{p,i}` the gradient of row :math:`i` on rank :math:`p`, and the terms added in the order of ranks,

.. math::
    g_i = \frac{1}{P} \sum_p g_{p,i}, \qquad\text{in a correction}\qquad g_i = \sum_p \frac{n_p}{\sum_q n_q} g_{p,i}.

Of a table that every rank has, all get it; of an :class:`OwnedEmbedding` the owner of the row, which steps it alone.
Torch's functions clip no sparse gradients, and of some rows other ranks have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.extensions.tables.exchange import TouchedRows, sums_of, to_all, to_owners, weights_of_ranks
from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding
from lightning_gnn_dist.extensions.tables.table import Table, coalesced, touched
from lightning_gnn_dist.rounds.sparse_gradients import no_rows, of_rows
from lightning_gnn_dist.wire import collectives

_CLIPS = "clip_grad_by_norm"  # Lightning's


@torch.no_grad()
def mean_at_each_step_(of_all: Sequence[Table], owned: Sequence[OwnedEmbedding]) -> bool:
    """Replace the gradients by the mean over ranks; where no rank has one, there is none. Collective.

    Args:
        of_all: Trained tables that every rank has.
        owned: Those of which each rank has some rows.

    Returns whether those are finite that lie on one rank each.
    """
    gradients = [coalesced(table.weight, table.name) for table in of_all]
    for table, total in zip(of_all, _sums(of_all, gradients), strict=True):
        table.weight.grad = None if total is None else _divided(total, collectives.world_size())
    are_finite = [_hand_to_owners(table) for table in owned]  # all of them, whatever is found in the first
    return all(are_finite)


@torch.no_grad()
def mean_gradients_(held: Sequence[tuple[int, Table]], gradients: list[Tensor], weight: float) -> None:
    """Replace coalesced gradients of tables that every rank has by weighted means over ranks. Collective.

    Args:
        held: The tables, one at least, and which of the gradients is theirs.
        gradients: The gradients, of which others stay as they are.
        weight: What those of this rank count for.
    """
    share = weight / sum(weights_of_ranks(weight, gradients[held[0][0]].device))
    own = []
    for place, _ in held:
        ids, values = touched(gradients[place])
        own.append(of_rows(gradients[place], ids, values * share))
    for (place, _), total in zip(held, _sums([table for _, table in held], own), strict=True):
        assert total is not None
        gradients[place] = total


def _sums(tables: Sequence[Table], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the sums over ranks of gradients of tables that every rank has; None where no rank has one.

    Collective, if there are any.
    """
    if not tables:
        return []
    weights, lengths = [table.weight for table in tables], [len(table.weight) for table in tables]
    found = [no_rows(weight) if each is None else each for weight, each in zip(weights, gradients, strict=True)]
    own = [TouchedRows(ids, [values]) for ids, values in map(touched, found)]
    came, ranks = to_owners(lengths, own, [int(each is not None) for each in gradients])
    has_any = [any(flags) for flags in zip(*ranks, strict=True)]
    sums = zip(weights, to_all(lengths, list(map(sums_of, came))), has_any, strict=True)
    return [of_rows(weight, ids, total) if has else None for weight, (ids, (total,)), has in sums]


def _hand_to_owners(table: OwnedEmbedding) -> bool:
    """Give a table the gradient of the rows that lie here; return whether all ranks' are finite. Collective."""
    parameter = table.parameter
    if parameter.grad is not None and not parameter.grad.is_sparse:
        raise ValueError(
            "The weight of an OwnedEmbedding has a dense gradient, and a rank has some of its rows alone, so that a "
            "product with it is not one with the whole table: look rows up by their ids alone."
        )
    ids, rows, has_any = table.take_gradients()
    flags = [int(has_any), int(bool(rows.isfinite().all()))]
    (came,), ranks = to_owners([table.num_embeddings], [TouchedRows(ids, [rows])], flags)
    if any(has_any for has_any, _ in ranks):
        ids, (total,) = sums_of(came)
        gradient = _divided(of_rows(parameter, ids - table.rows_of_rank[0], total), len(came))
        # There is one where a backward by hand comes before the step of another.
        parameter.grad = gradient if parameter.grad is None else (parameter.grad + gradient).coalesce()
    are_finite = all(is_finite for _, is_finite in ranks)
    if not are_finite:  # one row, also here where none is, so that mixed precision skips the step on all ranks or none
        ids = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        infinite = parameter.new_full((1, parameter.shape[1]), torch.inf, layout=torch.strided)
        parameter.grad = of_rows(parameter, ids, infinite)
    return are_finite


def _divided(gradient: Tensor, number: int) -> Tensor:
    gradient._values().div_(number)
    return gradient


# Clipping, as Lightning calls it.


def clip_sparse_gradients(precision: Precision, tables: Sequence[OwnedEmbedding]) -> None:
    """Let Lightning clip sparse gradients beside dense ones, by norm and by value.

    With ``tables`` of which each rank has some rows, a norm counts each row once, whichever rank has it. Collective
    when it clips then.
    """
    give_back_clipping(precision)
    parameters_of, owned = precision.main_params, {id(table.parameter) for table in tables}
    precision.main_params = lambda optimizer: stand_ins(parameters_of(optimizer))  # type: ignore[method-assign]

    def clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"]]
        mine, others = ([each for each in held if (id(each) in owned) is which] for which in (True, False))
        found = [coalesced(each, "an OwnedEmbedding") for each in mine]
        values = [gradient._values() for gradient in found if gradient is not None]
        total = nn.utils.clip_grad_norm_([*stand_ins(others), *_norm_of_ranks(mine, values)], clip_val)
        for each in values:
            each.mul_((clip_val / (total + 1e-6)).clamp(max=1.0).to(each.dtype))  # as torch clips

    if tables:
        vars(precision)[_CLIPS] = clip_by_norm


def give_back_clipping(precision: Precision) -> None:
    """Undo :func:`clip_sparse_gradients`."""
    for name in ("main_params", _CLIPS):
        vars(precision).pop(name, None)


def _norm_of_ranks(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return what has as its gradient the norm of the rows of all ranks, for torch's clipping. Collective."""
    if not parameters:
        return []
    like = parameters[0].data
    square = sum((rows.double().square().sum() for rows in values), like.new_zeros((), dtype=torch.float64))
    norm = collectives.all_gather_rows(square).sum().sqrt()  # the same bits on all ranks
    return [_stand_in(norm.to(like.dtype)[None])]


def stand_ins(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Yield parameters for torch's clipping, which takes no sparse gradients: in their place, what has the values."""
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            yield parameter
            continue
        parameter.grad = parameter.grad.coalesce()
        yield _stand_in(parameter.grad._values())  # the same memory: what is clipped is the gradient's


def _stand_in(gradient: Tensor) -> nn.Parameter:
    stand_in = nn.Parameter(torch.empty_like(gradient), requires_grad=False)
    stand_in.grad = gradient
    return stand_in
