"""A table of learned rows that no rank holds whole: each has a range of the rows, and asks the others for theirs.

one process:  whole table, made when it is first used, with sparse gradients
P ranks:      rank p has the rows from N p / P on; a forward asks for those of the batch
gradients:    wait here until the strategy hands them to the rows' owners

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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from threading import Condition, Thread
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_gnn_dist.checks import check_at_least, check_positive, check_seed, holds_integers, shown
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.extensions.asking.asking import Asking, Message
from lightning_gnn_dist.rounds.sparse_gradients import short
from lightning_gnn_dist.wire import collectives
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


ROWS_OF_BLOCK = 1024  # that are drawn at once, so that any range can be made without the others
_MIX = 0x9E3779B97F4A7C15  # neighbouring seeds are sent far from each other
_SEEDS = 1 << 32  # what torch's generator tells apart
_NOT_MADE, _WHOLE, _OWNED = range(3)  # what a rank has of a table
_NO_STATE_YET = "Save a checkpoint by the trainer, and load its weights: Module.load_from_checkpoint(path)."
_asks_nobody = [False]


@contextmanager
def asking_nobody() -> Iterator[None]:
    """In the block, ``state_dict()`` has what lies here: modules ask no rank, and make nothing."""
    _asks_nobody.append(True)
    try:
        yield
    finally:
        _asks_nobody.pop()


class OwnedEmbedding(nn.Module):
    """An ``nn.Embedding(num_embeddings, embedding_dim, sparse=True)`` of which each rank of a fit holds a part.

    With P ranks each has 1/P of the rows, and of the optimizer's moments of them. A forward asks the owners of the rows
    for what the batch lacks, and the gradient of a row goes to its owner at each step: on several ranks it takes
    :class:`GrappaStrategy`. In one process it is an ``nn.Embedding`` with sparse gradients. Either way its rows are
    made where they lie when they are first used, and depend on the seed alone, not on the number of ranks.

    ``state_dict()`` has the whole table, which it asks for, and ``load_state_dict()`` takes it. So a checkpoint holds
    it once, and is loaded on any number of ranks. After a fit ranks may look rows up while all of them run.

    Args:
        num_embeddings: How many rows there are: one for each node.
        embedding_dim: How many numbers a row has.
        std: The standard deviation of the numbers at the start.
        seed: Decides the rows at the start. None draws one from torch's generator, as layers draw their weights; ranks
            take rank 0's.

    Attributes:
        owners: The ranks that own the rows, None where all lie here.
    """

    sparse, max_norm = True, None  # as an nn.Embedding says it

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 1.0, seed: int | None = None) -> None:
        check_at_least(1, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_positive(std=std)
        if seed is not None:
            check_seed(seed)
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.std = num_embeddings, embedding_dim, std
        self.seed = int(torch.randint(2**62, ())) if seed is None else seed
        self.number = 0  # among the tables of its owners
        self._kind = _NOT_MADE
        self.owners: RowOwners | None = None
        self._gradients: list[tuple[Tensor, Tensor]] = []  # ids, each once, and the gradients of their rows
        # Of the shape of the whole, in the memory of one row, until there are rows.
        self._parameters["weight"] = nn.Parameter(torch.zeros(1, embedding_dim).expand(num_embeddings, -1))

    @property
    def weight(self) -> nn.Parameter:
        """The rows that lie here: all of them in one process, which makes them; a range of them in a fit of ranks."""
        if self._kind == _NOT_MADE:
            self._make_all()
        return self.parameter

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as optimizers see it, whose rows need not be made yet, or be elsewhere."""
        parameter = self._parameters["weight"]
        assert parameter is not None
        return parameter

    @property
    def rows_of_rank(self) -> tuple[int, int]:
        """Where the rows that lie here begin and end."""
        return (0, self.num_embeddings) if self.owners is None else self.owners.own(self.number)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of some ids, of shape ``(*ids.shape, embedding_dim)``. Not collective."""
        if self.owners is None:
            return functional.embedding(ids, self.weight, sparse=True)
        if not isinstance(ids, Tensor) or not holds_integers(ids):
            raise TypeError(f"ids must be a tensor of integers, as batch.n_id is, got {shown(ids)}.")
        unique, places = ids.unique(return_inverse=True)
        rows = sent(self.owners.rows(self.number, unique.long().cpu()), self.parameter.device)
        if torch.is_grad_enabled() and self.parameter.requires_grad:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._keep_gradient, unique.long()))
        return functional.embedding(places, rows)

    def settled_version(self) -> int | None:
        """Make the rows, and return how often they have changed, alike on all ranks; None where all lie here."""
        if self._kind == _NOT_MADE:
            self._make_all()
        return None if self.owners is None else self.owners.version

    def take_gradients(self) -> tuple[Tensor, Tensor, bool]:
        """Return the gradients since the last call: ids, each once and increasing, their sums, and if there are any."""
        (taken, self._gradients), like = (self._gradients, []), self.parameter.data
        if not taken:
            return torch.empty(0, dtype=torch.int64, device=like.device), like[:0], False
        if len(taken) == 1:
            return *taken[0], True
        ids, places = torch.cat([ids for ids, _ in taken]).unique(return_inverse=True)
        sums = like.new_zeros((len(ids), like.shape[1]))
        return ids, sums.index_add_(0, places, torch.cat([rows for _, rows in taken])), True

    def gather(self) -> None:
        """Hold all rows here from now on, and ask nobody any more. Not collective."""
        if self.owners is not None:
            self.parameter.data = self._whole().to(self.parameter.device)
            self._kind, self.owners = _WHOLE, None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, std={self.std:g}"

    def _keep_gradient(self, ids: Tensor, rows: Tensor) -> None:
        assert self.owners is not None and rows.grad is not None
        if not self.owners.trains:
            raise RuntimeError(
                f"The rows of this OwnedEmbedding lie on {self.owners.size} ranks, and outside a fit nobody takes "
                "their gradients: train with GrappaStrategy, or load the model in one process."
            )
        self._gradients.append((ids, rows.grad))
        rows.grad = None

    def _whole(self) -> Tensor:
        assert self.owners is not None
        if not self.owners.is_open:
            raise RuntimeError(
                f"Rows of this OwnedEmbedding lie on {self.owners.size} ranks, which have ended or were left. "
                f"{_NO_STATE_YET}"
            )
        return self.owners.whole(self.number, self.parameter.data)

    def _make_all(self) -> None:
        self._make(0, self.num_embeddings)
        self._kind = _WHOLE

    def _make(self, first: int, last: int) -> None:
        """Make the rows of a range. What an optimizer has of the parameter stays, as it has no rows yet."""
        with torch.inference_mode(False), torch.no_grad():
            rows = self.parameter.data.new_empty((last - first, self.embedding_dim))
            initial_rows_(rows, first, self.seed, self.std)
            self.parameter.data = rows

    # What torch calls.

    def _apply(self, fn: Any, recurse: bool = True) -> OwnedEmbedding:
        if self._kind != _NOT_MADE:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        with torch.no_grad():  # for the one row in memory, not for each
            self.parameter.data = fn(self.parameter.data[:1]).expand(self.num_embeddings, -1)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if _asks_nobody[-1]:
            destination[f"{prefix}weight"] = self.parameter.detach()
        elif self.owners is not None:
            destination[f"{prefix}weight"] = self._whole()
        else:
            destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, _: Any, strict: bool, missing_keys: list[str], *lists: list[str]
    ) -> None:
        name = f"{prefix}weight"
        if name not in state_dict:
            if strict:
                missing_keys.append(name)
            return
        found, shape = state_dict[name], (self.num_embeddings, self.embedding_dim)
        if tuple(found.shape) != shape:
            lists[-1].append(f"{name} has the shape {tuple(found.shape)} in the state, and {shape} here.")
            return
        first, last = self.rows_of_rank
        with torch.inference_mode(False), torch.no_grad():
            if self._kind == _NOT_MADE:
                self.parameter.data = found.detach().to(self.parameter.data, copy=True)
                self._kind = _WHOLE
            else:
                self.parameter.data.copy_(found[first:last])
        if self.owners is not None:
            self.owners.has_changed()

    def __getstate__(self) -> dict[str, Any]:
        if self.owners is not None:
            raise TypeError(
                f"An OwnedEmbedding whose rows lie on {self.owners.size} ranks cannot be copied or sent to another "
                f"process. {_NO_STATE_YET}"
            )
        state = {**self.__dict__}
        if self._kind == _NOT_MADE:
            row = nn.Parameter(self.parameter.data[:1].clone(), requires_grad=self.parameter.requires_grad)
            state["_parameters"] = {**self._parameters, "weight": row}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._kind == _NOT_MADE:
            self.parameter.data = self.parameter.data[:1].expand(self.num_embeddings, -1)

    # What strategies call.

    def _divide(self, kinds: list[int], seed: int) -> None:
        """Keep this rank's rows alone. Collective.

        Args:
            kinds: What each rank has of the table.
            seed: Rank 0's.
        """
        bounds = bounds_of(self.num_embeddings, collectives.world_size())
        first, last = bounds[collectives.rank() : collectives.rank() + 2]
        if _OWNED in kinds:
            if any(kind != _OWNED for kind in kinds) or len(self.parameter) != last - first:
                raise RuntimeError(f"Rows of an OwnedEmbedding lie on other ranks, of an earlier fit. {_NO_STATE_YET}")
        elif kinds[0] == _NOT_MADE:
            self.seed = seed
            self._make(first, last)
        else:
            rows = self.parameter.data.new_empty((last - first, self.embedding_dim))
            send_from_first(self.parameter.data, rows, self.num_embeddings)
            self.parameter.data = rows


def owned_tables(module: nn.Module) -> dict[str, OwnedEmbedding]:
    """Return the module's tables of which each rank holds a part, each once, by name, trained or not."""
    if not any(isinstance(child, OwnedEmbedding) for child in module.modules()):
        return {}
    return {name: child for name, child in module.named_modules() if isinstance(child, OwnedEmbedding)}


@torch.no_grad()
def divide(tables: Iterable[OwnedEmbedding], device: torch.device) -> RowOwners | None:
    """Give each rank its rows of rank 0's tables, unless it has them; return their owners. Collective.

    With one rank, or without tables, there are none.
    """
    held = list(tables)
    if not held or collectives.world_size() == 1:
        return None
    owners = held[0].owners
    is_ready = owners is not None and owners.is_open and all(each.owners is owners for each in held)
    own = [int(is_ready), *(number for each in held for number in (each._kind, each.seed))]
    ranks = collectives.gather_numbers([len(own), crc32(repr([*held]).encode())], device)
    if any(rank != ranks[0] for rank in ranks):
        raise ValueError(f"Ranks have other tables than rank 0, which has {held}: make the model alike on all ranks.")
    ranks = collectives.gather_numbers(own, device)
    if owners is not None and all(is_ready for is_ready, *_ in ranks):
        return owners
    for number, each in enumerate(held):
        kinds, seeds = ([rank[1 + 2 * number + which] for rank in ranks] for which in range(2))
        each._divide(kinds, seeds[0])
    owners = RowOwners([each.parameter for each in held], [each.num_embeddings for each in held])
    for number, each in enumerate(held):
        each.owners, each.number, each._kind, each._gradients = owners, number, _OWNED, []
    weakref.finalize(held[0], owners.close_behind).atexit = False
    return owners


@torch.no_grad()
def initial_rows_(out: Tensor, first: int, seed: int, std: float) -> None:
    """Fill ``out`` with the rows from number ``first`` on: normal numbers that seed and ids alone decide."""
    stop = first + len(out)
    for block in range(first // ROWS_OF_BLOCK, -(-stop // ROWS_OF_BLOCK)):
        begin = block * ROWS_OF_BLOCK
        generator = torch.Generator().manual_seed(((seed * _MIX >> 32) + block) % _SEEDS)
        rows = torch.randn(ROWS_OF_BLOCK, out.shape[1], generator=generator, dtype=torch.float32).mul_(std)
        low, high = max(first, begin), min(stop, begin + ROWS_OF_BLOCK)
        out[low - first : high - first] = rows[low - begin : high - begin]  # in its own type, on its device
