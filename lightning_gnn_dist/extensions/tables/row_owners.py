"""The ranks that own the rows of tables, each a range of ids, and what they answer when others ask for rows.

    asker: ids -> a question to each owner -> their rows
    owner: waits until its rows are as old as the question says -> answers

Asking is not collective: ranks look rows up as often as they like. A question says how often the asker has seen the
tables change: by a step of the optimizer, or by weights that were loaded, both of which all ranks do alike. An owner
that has changed its rows less often waits until it has. It cannot be ahead: before its next step it takes part in an
exchange that needs the asker, too.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.rounds.sparse_gradients import short
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.asking import Asking, Message
from lightning_gnn_dist.wire.channel import exchange_pieces, open_channel, patience

PIECE_BYTES = 1 << 24  # of what is sent in one answer where many rows are wanted

Moments = Callable[[Tensor], dict[str, Any]]


def bounds_of(num_rows: int, num_ranks: int) -> list[int]:
    """Return where the rows of each rank begin, and at last where they all end: even ranges of ids."""
    return [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]


def pieces_of(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Divide a range of rows into ranges that are sent at once."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)


class RowOwners:
    """The ranks of a run as owners of the rows of some tables. Making one is collective.

    It holds no module, as threads that answer keep it alive: other ranks may still ask when the module is gone.

    Args:
        tables: For each table, the rows of this rank, in a parameter whose data may be replaced.
        num_rows: How many rows each table has on all ranks together.

    Attributes:
        tables: For each table, what has the rows that lie here.
        moments: Returns the optimizer's state of a parameter, for which other ranks may ask, too.
        version: How often the rows of this rank have changed.
        is_open: Whether other ranks can be asked.
        trains: Whether a strategy hands gradients of rows to their owners.
        is_stepping: Whether the optimizer steps next, on some ranks sooner than on others: nobody may ask until it has.
    """

    def __init__(self, tables: Sequence[nn.Parameter], num_rows: Sequence[int]) -> None:
        self.rank, self.size = collectives.rank(), collectives.world_size()
        self.bounds = [bounds_of(number, self.size) for number in num_rows]
        self.tables = list(tables)
        self.moments: Moments = lambda _: {}
        self.version = 0
        self.trains = self.is_stepping = self._is_closed = False
        self._seconds, self._change = patience().total_seconds(), Condition()
        self._channel, self.is_open = open_channel(self.size), True
        self._asking = Asking(self._channel, self._answer)
        # Here, so that it comes before what waits for the processes of other ranks.
        atexit.register(self._close_at_exit)

    def own(self, table: int) -> tuple[int, int]:
        """Return where the rows of this rank begin and end."""
        bounds = self.bounds[table]
        return bounds[self.rank], bounds[self.rank + 1]

    def has_changed(self) -> None:
        """Note that the rows here have changed, as they have or will on all ranks."""
        self.is_stepping = False
        with self._change:
            self.version += 1
            self._change.notify_all()

    def rows(self, table: int, ids: Tensor) -> Tensor:
        """Return rows of a table, on the CPU. Not collective.

        Args:
            table: The number of the table.
            ids: Which rows: each once, increasing, on the CPU.
        """
        bounds = self.bounds[table]
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= bounds[-1]):
            wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
            raise IndexError(f"Row {wrong} of an OwnedEmbedding with rows 0 to {bounds[-1] - 1}: look up ids of nodes.")
        cuts = torch.searchsorted(ids, torch.tensor(bounds)).tolist()
        of_ranks = [ids[cuts[rank] : cuts[rank + 1]] - bounds[rank] for rank in range(self.size)]
        return self._asked(table, {rank: [short(of, bounds[-1])] for rank, of in enumerate(of_ranks) if len(of)})

    def whole(self, table: int, like: Tensor, moment: str = "") -> Tensor:
        """Return the rows of all ranks, piece by piece, in the type of ``like``, on the CPU. Not collective.

        Args:
            table: The number of the table.
            like: A tensor with rows as wide.
            moment: The name of a tensor of the optimizer's state to take in the table's place.
        """
        bounds, name = self.bounds[table], torch.tensor(list(moment.encode()), dtype=torch.uint8)
        found = torch.empty((bounds[-1], *like.shape[1:]), dtype=like.dtype)
        row_bytes = like.element_size() * math.prod(like.shape[1:])
        for owner, (first, last) in enumerate(pairwise(bounds)):
            for start, stop in pieces_of(first, last, row_bytes):
                ends = torch.tensor([start - first, stop - first])
                found[start:stop] = self._asked(table, {owner: [ends, name]})
        return found

    def _asked(self, table: int, questions: Mapping[int, Message]) -> Tensor:
        if self.is_stepping:
            raise RuntimeError(
                "Rows were looked up between the exchange of gradients and the optimizer's step, where some ranks have "
                "stepped and others have not: look them up before the backward or after the step."
            )
        if not questions:
            return self._here(table, torch.empty(0, dtype=torch.int64))
        own, head = questions.get(self.rank), torch.tensor([table, self.version])
        headed = [[head, *questions[rank]] if rank in questions else None for rank in range(self.size)]
        answers, mine = self._asking.ask(0, headed, lambda: [] if own is None else [self._here(table, *own)])
        answers[self.rank] = mine
        said = [rows for answer in answers for rows in answer or ()]
        return said[0] if len(said) == 1 else torch.cat(said)

    # What this rank answers, in any thread.

    def _answer(self, _: int, question: Message) -> Message:
        head, *rest = question
        table, version = head.tolist()
        self._wait_for(version)
        return [self._here(table, *rest)]

    def _here(self, table: int, places: Tensor, name: Tensor | None = None) -> Tensor:
        """Return rows that lie here: those of some places, or with a ``name`` from one to another."""
        parameter = self.tables[table]
        if name is None:
            return parameter.data.index_select(0, sent(places, parameter.device)).cpu()
        (start, stop), moment = places.tolist(), name.numpy().tobytes().decode()
        rows = self.moments(parameter)[moment] if moment else parameter.data
        return rows[start:stop].detach().to("cpu", copy=True)

    def _wait_for(self, version: int) -> None:
        with self._change:
            came = self._change.wait_for(lambda: self._is_closed or self.version >= version, self._seconds)
            if self._is_closed and self.version < version:
                raise RuntimeError("The connections to other ranks were closed.")
            if not came or self.version > version:
                raise RuntimeError(
                    f"The rows here have changed {self.version} times, and those of the rank that asks {version} "
                    "times: all ranks must step their optimizers, and load weights, equally often."
                )

    # Their end.

    def abort(self) -> None:
        """End at once what this rank asks and answers, after an error. Not collective."""
        self._wake()
        self._asking.abort()
        self._end()

    def close(self) -> None:
        """Ask nothing more, and answer until the other ranks have closed theirs, too. Not collective."""
        if self.is_open:
            self._asking.close()
            self._wake()
            self._end()

    def close_behind(self) -> None:
        """Close in the background, once the module is gone."""
        if self.is_open:
            Thread(target=self.close, daemon=True, name="lightning_gnn_dist.tables.closing").start()

    def _close_at_exit(self) -> None:
        """Answer at the end of a script until the other ranks have come to theirs; after an error, end at once."""
        if hasattr(sys, "last_value"):
            self.abort()
        else:
            self.close()

    def _wake(self) -> None:
        """Let nobody wait any more."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()

    def _end(self) -> None:
        self.is_open = False
        atexit.unregister(self._close_at_exit)
        self._channel.close()


def send_from_first(source: Tensor, out: Tensor, num_rows: int) -> None:
    """Give each rank its rows of rank 0's table, piece by piece. Collective.

    Args:
        source: Rank 0's whole table; elsewhere nothing of it is read.
        out: Where the rows of this rank go.
        num_rows: How many rows the whole table has.
    """
    rank, size = collectives.rank(), collectives.world_size()
    ranges = [*pairwise(bounds_of(num_rows, size))]
    longest = max(last - first for first, last in ranges)
    for start, stop in pieces_of(0, longest, out.element_size() * out.shape[1]):
        ends = [(min(first + start, last), min(first + stop, last)) for first, last in ranges]
        from_first = [[end - begin] for begin, end in ends]
        lengths = [from_first if sender == 0 else [[0]] * size for sender in range(size)]
        sent = [[source[begin:end].to(out.device) if rank == 0 else out[:0]] for begin, end in ends]
        ((came,), *_) = exchange_pieces(sent, lengths)
        out[start : start + len(came)] = came
