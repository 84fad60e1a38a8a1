r"""Rows of tables that ranks have touched, on their way home, and what becomes of them there: a mean or a sum.

Of replicas the mean, of gradients the sum. With :math:`\theta_{p,i}` row :math:`i` on rank :math:`p`, and
:math:`a_{p,i}` what it counts for,

.. math::
    \theta_i \leftarrow \sum_p \frac{a_{p,i}}{\sum_q a_{q,i}}\, \theta_{p,i}, \qquad g_i \leftarrow \sum_p g_{p,i}

A row that one rank alone has touched is that rank's, to the bit. Terms are added in the order of ranks. There are two
ways home:

to all       of a table that every rank has: one of the ranks that have touched a row puts it together for all
to owners    gradients of an :class:`OwnedEmbedding`: the owner of a row adds them up, and alone steps the row

At every step the sum is divided by the number of ranks, in a correction each gradient is multiplied by the rank's share
of the seeds before. Torch's functions clip no sparse gradients, and of some rows other ranks have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding, bounds_of, owned_tables
from lightning_gnn_dist.rounds.sparse_gradients import check_sparse, no_rows, of_rows, short, take_rows_
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces

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


class TouchedRows(NamedTuple):
    """Some rows of one table, and of tensors that have a row for each of the table's.

    Attributes:
        ids: Which rows: each once, increasing.
        values: For each tensor, these rows. All ranks have the same tensors.
    """

    ids: Tensor
    values: list[Tensor]


# Makes of the rows of ranks, in their order, one row for each of the ids: a list with a tensor for each that is made.
Merge = Callable[[Tensor, list[TouchedRows]], list[Tensor]]


def ids_of(ranks: Iterable[TouchedRows]) -> Tensor:
    """Return the ids of the rows of all these ranks, each once and increasing."""
    ids: Tensor = torch.cat([rows.ids for rows in ranks]).unique()
    return ids


def sums_of(ids: Tensor, ranks: Sequence[TouchedRows]) -> list[Tensor]:
    """Return the sums of rows over ranks."""
    like = ranks[0].values[0]
    total = like.new_zeros((len(ids), *like.shape[1:]))
    for rows in ranks:
        total.index_add_(0, torch.searchsorted(ids, rows.ids), rows.values[0])
    return [total]


def means_of(ids: Tensor, ranks: Sequence[TouchedRows], weights: Sequence[float]) -> list[Tensor]:
    """Return the means of rows, of which each counts as often as its rank has touched it, times the rank's weight.

    The first of their values is how often. Ranks of weight 0 are left out, whose rows may be NaN.
    """
    counting = [(rows, weight) for rows, weight in zip(ranks, weights, strict=True) if weight > 0]
    places = [torch.searchsorted(ids, rows.ids) for rows, _ in counting]
    total = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    for (rows, weight), place in zip(counting, places, strict=True):
        total.index_add_(0, place, weight * rows.values[0].double())
    means = []
    for number, tensor in enumerate(ranks[0].values[1:], start=1):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = torch.zeros((len(ids), *tensor.shape[1:]), dtype=dtype, device=ids.device)
        for (rows, weight), place in zip(counting, places, strict=True):
            share = (weight * rows.values[0].double() / total[place]).to(dtype)
            mean.index_add_(0, place, share[:, None] * rows.values[number].to(dtype))
        means.append(mean.to(tensor.dtype))
    return means


def weights_of_ranks(weight: float, device: torch.device) -> list[float]:
    """Return what each rank counts for; refuse that none does. Collective."""
    rows: list[float] = collectives.all_gather_rows(torch.tensor(weight, dtype=torch.float64, device=device)).tolist()
    collectives.check_total(sum(rows))
    return rows


# To all.


class Touches:
    """Which rows of a table each rank has touched. The same on all ranks.

    Args:
        of_ranks: The ids of each rank: each once, increasing.

    Attributes:
        ids: Those of all ranks: each once, increasing.
        by_home: Their places in the order of their homes, the ranks that put them together, which have touched them.
        num_sent: How many rows each rank sends to each home.
    """

    def __init__(self, of_ranks: Sequence[Tensor]) -> None:
        self.of_ranks = [ids.long() for ids in of_ranks]
        joined = torch.cat(self.of_ranks)
        ranks = torch.cat([torch.full_like(ids, rank) for rank, ids in enumerate(self.of_ranks)])
        self.ids, counts = joined.unique(return_counts=True)
        starts = counts.cumsum(0) - counts
        by_id = ranks[joined.argsort(stable=True)]
        homes, size = by_id[starts + self.ids % counts], len(self.of_ranks)
        pairs = ranks * size + homes[torch.searchsorted(self.ids, joined)]  # of source and home
        cells = torch.cat([pairs, homes + size * size])
        numbers = cells.new_zeros(size * (size + 1)).scatter_add_(0, cells, torch.ones_like(cells)).tolist()
        self.num_sent = [numbers[source * size : (source + 1) * size] for source in range(size)]
        self.by_home = homes.argsort(stable=True)
        self._of_homes: tuple[Tensor, ...] = self.ids[self.by_home].split(numbers[size * size :])
        self._of_pairs: tuple[Tensor, ...] = pairs.argsort(stable=True).split(numbers[: size * size])
        self._firsts = [0, *accumulate(map(len, self.of_ranks))]

    def of_home(self, home: int) -> Tensor:
        """Return the ids of the rows that a rank puts together."""
        return self._of_homes[home]

    def sent(self, source: int, home: int) -> Tensor:
        """Return the places, among the rows that ``source`` has touched, of those that ``home`` puts together."""
        return self._of_pairs[source * len(self.of_ranks) + home] - self._firsts[source]


@torch.no_grad()
def to_all(
    tables: Sequence[Tensor], own: Sequence[TouchedRows], merge: Merge, flags: Sequence[int] = ()
) -> tuple[list[tuple[Touches, list[Tensor]]], list[list[int]]]:
    r"""Return for each table who has touched what, and what ``merge`` makes of it; and each rank's flags. Collective.

    All ranks first hear which rows each has touched: an id takes four bytes, eight in a table of more than 2**31 rows.
    A row of :math:`t` ranks is put together by one of them, to which the :math:`t - 1` others send theirs, and which
    sends the result to all: :math:`t - 1 + P - 1` times a row, where sending each rank's to all would take
    :math:`t (P - 1)`.

    Args:
        tables: The tables, the same on all ranks.
        own: For each table, what this rank has touched.
        merge: Makes one row of those of several ranks. It is called for the rows that this rank puts together.
        flags: Numbers of the caller's, as many on all ranks.
    """
    pieces = [sent(torch.tensor(flags, dtype=torch.int32), own[0].ids.device)]
    pieces += [short(rows.ids, len(table)) for table, rows in zip(tables, own, strict=True)]
    whats, *of_tables = zip(*all_gather_pieces(pieces), strict=True)
    touches, values = [Touches(of_ranks) for of_ranks in of_tables], [rows.values for rows in own]
    rank, ranks = collectives.rank(), range(collectives.world_size())
    made = [merge(each.of_home(rank), rows) for each, rows in zip(touches, _to_homes(touches, values), strict=True)]
    lengths = [
        [len(each.of_home(home)) for each, tensors in zip(touches, made, strict=True) for _ in tensors]
        for home in ranks
    ]
    found = iter(zip(*all_gather_pieces([each for tensors in made for each in tensors], lengths), strict=True))
    merged = [
        (each, [_joined(each, next(found)) for _ in tensors]) for each, tensors in zip(touches, made, strict=True)
    ]
    return merged, torch.stack(whats).tolist()


def _to_homes(touches: Sequence[Touches], own: Sequence[Sequence[Tensor]]) -> list[list[TouchedRows]]:
    """Send rows to the ranks that put them together; return for each table those of each rank to put together here."""
    rank, ranks = collectives.rank(), range(collectives.world_size())
    pairs = list(zip(touches, own, strict=True))
    lengths = [
        [[each.num_sent[source][home] for each, tensors in pairs for _ in tensors] for home in ranks]
        for source in ranks
    ]
    leaving = [[tensor[each.sent(rank, home)] for each, tensors in pairs for tensor in tensors] for home in ranks]
    found = [iter(pieces) for pieces in exchange_pieces(leaving, lengths)]
    return [
        [
            TouchedRows(each.of_ranks[source][each.sent(source, rank)], [next(found[source]) for _ in tensors])
            for source in ranks
        ]
        for each, tensors in pairs
    ]


def _joined(touches: Touches, of_homes: Sequence[Tensor]) -> Tensor:
    rows = torch.cat(list(of_homes))
    joined = torch.empty_like(rows)
    joined[touches.by_home] = rows
    return joined


@torch.no_grad()
def mean_at_all_(tables: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Replace rows that ranks have touched, and their moments, by weighted means, on all ranks. Collective.

    Args:
        tables: For each table, itself and its moments. All ranks have the same tensors.
        steps: For each table and each of its rows, how many local steps of this rank have touched it.
        weights: What each rank counts for. What ranks of weight 0 alone have touched becomes what others have.
    """
    own = []
    for counts, tensors in zip(steps, tables, strict=True):
        ids = counts.nonzero().flatten()
        own.append(TouchedRows(ids, [counts[ids], *(tensor[ids] for tensor in tensors)]))
    merged, _ = to_all([tensors[0] for tensors in tables], own, partial(means_of, weights=weights))
    counting = [rank for rank, weight in enumerate(weights) if weight > 0]
    for tensors, (touches, means) in zip(tables, merged, strict=True):
        is_counted = torch.isin(touches.ids, torch.cat([touches.of_ranks[rank] for rank in counting]))
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.index_copy_(0, touches.ids[is_counted], mean[is_counted])
        if len(left := touches.ids[~is_counted]):  # on all ranks alike
            take_rows_(tensors, [left] * len(tensors), counting[0])


# To owners.


def to_owners(num_rows: int, rows: TouchedRows, flags: Sequence[int] = ()) -> tuple[list[TouchedRows], list[list[int]]]:
    """Send rows of a table to their owners; return the rows of each rank that lie here, and its flags. Collective.

    Args:
        num_rows: How many rows the table has.
        rows: What this rank sends. All ranks have the same tensors.
        flags: Numbers of the caller's, as many on all ranks.
    """
    bounds, device = bounds_of(num_rows, collectives.world_size()), rows.values[0].device
    ids = sent(rows.ids, device)
    ends = [*pairwise(torch.searchsorted(ids, sent(torch.tensor(bounds), device)).tolist())]
    ranks = collectives.gather_numbers([*flags, *(stop - start for start, stop in ends)], device)
    counts = [numbers[len(flags) :] for numbers in ranks]
    leaving = [
        [short(ids[start:stop] - first, num_rows), *(each[start:stop] for each in rows.values)]
        for first, (start, stop) in zip(bounds, ends, strict=False)
    ]
    came = exchange_pieces(leaving, [[[count] * len(leaving[0]) for count in of_rank] for of_rank in counts])
    found = [TouchedRows(places.long(), values) for places, *values in came]
    return found, [numbers[: len(flags)] for numbers in ranks]


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
    weights = [table.weight for table in tables]
    found = [no_rows(weight) if each is None else each for weight, each in zip(weights, gradients, strict=True)]
    own = [TouchedRows(ids, [values]) for ids, values in map(touched, found)]
    merged, ranks = to_all(weights, own, sums_of, [int(each is not None) for each in gradients])
    has_any = [any(flags) for flags in zip(*ranks, strict=True)]
    sums = zip(weights, merged, has_any, strict=True)
    return [of_rows(weight, touches.ids, total) if has else None for weight, (touches, (total,)), has in sums]


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
    came, ranks = to_owners(table.num_embeddings, TouchedRows(ids, [rows]), flags)
    if any(has_any for has_any, _ in ranks):
        ids = ids_of(came)
        gradient = _divided(of_rows(parameter, ids, *sums_of(ids, came)), len(came))
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
