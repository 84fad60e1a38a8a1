r"""Rows of tables that ranks have touched, on their way home, and what becomes of them there: a mean or a sum.

Of replicas the mean, of gradients the sum. With :math:`\theta_{p,i}` row :math:`i` on rank :math:`p`, and
:math:`a_{p,i}` what it counts for,

.. math::
    \theta_i \leftarrow \sum_p \frac{a_{p,i}}{\sum_q a_{q,i}}\, \theta_{p,i}, \qquad g_i \leftarrow \sum_p g_{p,i}

A row that one rank alone has touched is that rank's, to the bit. Terms are added in the order of ranks. There are two
ways home:

to all       of a table that every rank has: one of the ranks that have touched a row puts it together for all
to owners    gradients of a table of which each rank has a range of rows: the owner of a row adds them up
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.extensions.tables.row_owners import bounds_of
from lightning_gnn_dist.rounds.sparse_gradients import short, take_rows_
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces


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
