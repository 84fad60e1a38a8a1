r"""Which ranks have touched which rows of a table, and their rows put together with no more bytes than that takes.

All ranks first hear which rows each has touched. A row of :math:`t` ranks is put together by one of them, to which the
:math:`t - 1` others send theirs, and which sends the result to all: :math:`t - 1 + P - 1` times a row, where sending
each rank's to all would take :math:`t (P - 1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.pieces import all_gather_pieces, exchange_pieces

_MOST_SHORT = 2**31 - 1  # the largest id of four bytes


class Rows(NamedTuple):
    """Some rows of one table, and of tensors that have a row for each of the table's.

    Attributes:
        ids: Which rows: each once, increasing.
        values: For each tensor, these rows. All ranks have the same tensors.
    """

    ids: Tensor
    values: list[Tensor]


# Makes of the rows of ranks, in their order, one row for each of the ids: a list with a tensor for each that is made.
Merge = Callable[[Tensor, list[Rows]], list[Tensor]]


class Touches:
    """Which rows of a table each rank has touched. The same on all ranks.

    Args:
        of_ranks: The ids of each rank: each once, increasing.

    Attributes:
        ids: Those of all ranks: each once, increasing.
        homes: For each of them, the rank that puts it together. It has touched it.
        homes_of: The same for what each rank has touched.
        num_sent: How many rows each rank sends to each of these.
    """

    def __init__(self, of_ranks: Sequence[Tensor]) -> None:
        self.of_ranks = [ids.long() for ids in of_ranks]
        joined = torch.cat(self.of_ranks)
        ranks = torch.cat([torch.full_like(ids, rank) for rank, ids in enumerate(self.of_ranks)])
        self.ids, counts = joined.unique(return_counts=True)
        starts = counts.cumsum(0) - counts
        by_id = ranks[joined.argsort(stable=True)]
        self.homes = by_id[starts + self.ids % counts]
        self.homes_of = [self.homes[torch.searchsorted(self.ids, ids)] for ids in self.of_ranks]
        self.num_sent = [homes.bincount(minlength=len(self.of_ranks)).tolist() for homes in self.homes_of]

    def of_home(self, home: int) -> Tensor:
        """Return the ids of the rows that a rank puts together."""
        found: Tensor = self.ids[self.homes == home]
        return found

    def touched_by(self, ranks: Sequence[int]) -> Tensor:
        """Return, for each of the ids, whether one of these ranks has touched it."""
        found: Tensor = torch.isin(self.ids, torch.cat([self.ids[:0], *(self.of_ranks[rank] for rank in ranks)]))
        return found

    def sent(self, source: int, home: int) -> Tensor:
        """Return, for each row that ``source`` has touched, whether ``home`` puts it together."""
        return self.homes_of[source] == home


def short(ids: Tensor, table: Tensor) -> Tensor:
    """Return ids of rows of a table as they travel."""
    return ids.int() if len(table) <= _MOST_SHORT else ids


def gather_touches(
    tables: Sequence[Tensor], own: Sequence[Tensor], flags: Sequence[int] = ()
) -> tuple[list[Touches], list[list[int]]]:
    """Return for each table which rows each rank has touched, and the flags of each rank. Collective.

    An id takes four bytes, eight in a table of more than 2**31 rows.

    Args:
        tables: The tables, the same on all ranks.
        own: For each table, the ids that this rank has touched: each once, increasing.
        flags: Numbers of the caller's, as many on all ranks.
    """
    pieces = [torch.tensor(flags, dtype=torch.int32, device=own[0].device)]
    pieces += [short(ids, table) for table, ids in zip(tables, own, strict=True)]
    whats, *of_tables = zip(*all_gather_pieces(pieces), strict=True)
    return [Touches(of_ranks) for of_ranks in of_tables], [what.tolist() for what in whats]


@torch.no_grad()
def put_together(touches: Sequence[Touches], own: Sequence[Sequence[Tensor]], merge: Merge) -> list[list[Tensor]]:
    """Return for each table what ``merge`` makes of the touched rows, in the order of ``Touches.ids``. Collective.

    Args:
        touches: For each table, who has touched what.
        own: For each table, tensors with a row for each that this rank has touched. All ranks have the same tensors.
        merge: Makes one row of those of several ranks. It is called for the rows that this rank puts together.
    """
    rank, ranks = collectives.rank(), range(collectives.world_size())
    made = [merge(each.of_home(rank), rows) for each, rows in zip(touches, _to_homes(touches, own), strict=True)]
    lengths = [
        [len(each.of_home(home)) for each, tensors in zip(touches, made, strict=True) for _ in tensors]
        for home in ranks
    ]
    found = all_gather_pieces([tensor for tensors in made for tensor in tensors], lengths)
    pieces = iter(zip(*found, strict=True))
    return [[_joined(each, next(pieces)) for _ in tensors] for each, tensors in zip(touches, made, strict=True)]


def _to_homes(touches: Sequence[Touches], own: Sequence[Sequence[Tensor]]) -> list[list[Rows]]:
    """Send rows to the ranks that put them together; return for each table those of each rank to put together here."""
    rank, ranks = collectives.rank(), range(collectives.world_size())
    pairs = list(zip(touches, own, strict=True))
    lengths = [
        [[each.num_sent[source][home] for each, tensors in pairs for _ in tensors] for home in ranks]
        for source in ranks
    ]
    sent = [[tensor[each.sent(rank, home)] for each, tensors in pairs for tensor in tensors] for home in ranks]
    found = [iter(pieces) for pieces in exchange_pieces(sent, lengths)]
    return [
        [
            Rows(each.of_ranks[source][each.sent(source, rank)], [next(found[source]) for _ in tensors])
            for source in ranks
        ]
        for each, tensors in pairs
    ]


def _joined(touches: Touches, of_homes: Sequence[Tensor]) -> Tensor:
    rows = torch.cat(list(of_homes))
    joined = torch.empty_like(rows)
    joined[touches.homes.argsort(stable=True)] = rows
    return joined
