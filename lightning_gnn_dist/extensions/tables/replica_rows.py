"""The rows of a table that no rank holds whole, as one replica trains them in a round.

    lookup:   rows that the replica has are its own; others come from their owners, as of the last meeting, and stay
    step:     the optimizer is given the rows of the gradient, and their moments, as if they were the whole table
    meeting:  the rows go back to their owners

An owner's own rows are no exception: it trains copies of them, so that what it answers stays that of the last meeting.
Between steps the parameter has the shape of the whole table, in the memory of one row, and its sparse gradient the ids
of nodes. So everything that handles gradients takes it for a table that each rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.extensions.tables.exchange import TouchedRows
from lightning_gnn_dist.extensions.tables.lazy_adam import LazyAdam
from lightning_gnn_dist.extensions.tables.owned_embedding import OwnedEmbedding, ask_owners, keep_apart, refuse_product
from lightning_gnn_dist.extensions.tables.table import coalesced, holds, touched
from lightning_gnn_dist.rounds.sparse_gradients import of_rows

_GROWTH = 1.5  # of the memory, where it is too small
_LEAST_BYTES = 1 << 26  # on a CPU, where memory that holds no rows yet is not taken, and so large a piece is given back
_ROW, _STEPS = "the row", "local steps that have touched it"  # beside the names of moments


class _Step(NamedTuple):
    """Where the rows that a step moves are, and the gradient with the ids of nodes."""

    optimizer: Optimizer
    of_round: Tensor
    lasting: Tensor
    gradient: Tensor | None


class ReplicaRows:
    """The rows of one table that this rank's replica trains, from :meth:`begin` to :meth:`end`.

    Args:
        table: The table, whose rows have owners.
        optimizers: Those of the fit, of which one at most may hold it.
        averages: Whether ranks put together the moments of a name. Those go to the owners with the rows; others stay
            with the rank, of all rows that it has touched in the fit.
        is_in_round: Whether this rank trains: from then on, rows that are looked up for a gradient stay here.

    Attributes:
        held: The rows that lie here, as of the last meeting, while the parameter has none.
        moments: Those that ranks put together, of the rows that lie here, as of the last meeting.
    """

    def __init__(
        self,
        table: OwnedEmbedding,
        optimizers: Sequence[Optimizer],
        averages: Callable[[str], bool],
        is_in_round: Callable[[], bool],
    ) -> None:
        self.table, self._optimizers, self._averages, self.is_in_round = table, optimizers, averages, is_in_round
        self.held = nn.Parameter(torch.empty(0), requires_grad=table.parameter.requires_grad)
        self.moments: dict[str, Tensor] = {}
        self._of_round, self._lasting = GrowingRows(), GrowingRows()
        self._step: _Step | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that optimizers hold."""
        return self.table.parameter

    @property
    def averaged(self) -> list[str]:
        """The names of the moments that ranks put together, in order."""
        return sorted(self._of_round.starts.keys() - {_ROW, _STEPS} | self.moments.keys())

    def begin(self) -> None:
        """Begin a fit: take what the optimizer's constructor has made for the rows that lie here."""
        optimizer = self._holder()
        keep_apart(self.table, self)
        like = self.held.data
        self._of_round.declare(_ROW, like.new_zeros(1, *like.shape[1:]))
        self._of_round.declare(_STEPS, torch.zeros(1, dtype=torch.int32, device=like.device))
        for name, moment in self.moments.items():
            self._of_round.declare(name, torch.zeros_like(moment[:1]))
        made = {} if optimizer is None else _taken(optimizer.state.get(self.parameter, {}), like.shape)
        for name, moment in made.items():
            if self._averages(name):
                self.moments.setdefault(name, moment)  # one of a checkpoint wins
            self._store(name).declare(name, moment[:1].clone() if len(moment) else like.new_zeros(1, *like.shape[1:]))

    def end(self) -> None:
        """End the fit."""
        self._of_round.clear()
        self.table.keep_together()

    def rows(self, ids: Tensor, *, trains: bool) -> Tensor:
        """Return rows as this replica has them. Not collective.

        Args:
            ids: Which rows: each once, increasing, on the CPU.
            trains: Whether it is for a gradient.
        """
        is_in_round = self.is_in_round()
        if is_in_round and trains:
            return self._of_round.take(_ROW, self._kept(ids))
        slots = self._of_round.slots(ids) if is_in_round else torch.full_like(ids, -1)
        is_here = slots >= 0
        (asked,) = ask_owners(self.table, ids[~is_here])
        if not bool(is_here.any()):
            return asked
        rows = asked.new_empty((len(ids), *asked.shape[1:]))
        rows[~is_here], rows[is_here] = asked, self._of_round.take(_ROW, slots[is_here])
        return rows

    def begin_step(self, optimizer: Optimizer) -> None:
        """Give the optimizer the rows that it is about to move, and count them."""
        refuse_product(self.held.grad)
        if (gradient := coalesced(self.parameter, "an OwnedEmbedding")) is not None:
            ids, values = touched(gradient)
            slots = self._lend(optimizer, ids.cpu(), values, gradient)
            self._of_round.put(_STEPS, slots, self._of_round.take(_STEPS, slots) + 1)

    def end_step(self) -> None:
        """Take back what the optimizer has been given, moved or not."""
        step, self._step = self._step, None
        if step is None:
            return
        self._of_round.put(_ROW, step.of_round, self.parameter.data)
        state = step.optimizer.state.get(self.parameter, {})
        for name, moment in _taken(state, self.parameter.shape).items():
            store = self._store(name)
            store.declare(name, moment.new_zeros(1, *moment.shape[1:]))  # an optimizer's moments begin at zero
            store.put(name, step.of_round if store is self._of_round else step.lasting, moment)
        self.parameter.grad = None
        self.table.show_none()
        self.parameter.grad = step.gradient

    def begin_state(self) -> None:
        """Make the state that the first step would find: another rank may have touched rows where this one has none."""
        if not any(map(self._averages, ("exp_avg", "exp_avg_sq"))):
            return
        optimizer = self._holder()
        if isinstance(optimizer, LazyAdam) and not optimizer.state.get(self.parameter):
            gradient = self.parameter.grad
            self._lend(optimizer, torch.empty(0, dtype=torch.int64), self.held.data[:0], gradient)
            optimizer.begin_state(self.parameter)
            self.end_step()

    def trained(self) -> Tensor:
        """Return the rows of this round."""
        return self._of_round.all_of(_ROW)

    def touched(self, ranges: Sequence[tuple[int, int]]) -> TouchedRows:
        """Return the rows of some ranges of ids that steps of this round have moved.

        Of each there is how many steps have moved it, itself, and its averaged moments.
        """
        for name in self.averaged:
            self._of_round.declare(name, torch.zeros_like(self.held.data[:1]))
        ids, slots = self._of_round.in_ranges(ranges)
        is_touched = self._of_round.take(_STEPS, slots).cpu() > 0
        ids, slots = ids[is_touched], slots[is_touched]
        return TouchedRows(ids, [self._of_round.take(name, slots) for name in (_STEPS, _ROW, *self.averaged)])

    def owned_tensors(self) -> list[Tensor]:
        """Return the rows that lie here, and their averaged moments, which begin here if they are new."""
        here = self.held.data
        for name in self.averaged:
            self.moments.setdefault(name, torch.zeros_like(here))
        return [here, *(self.moments[name] for name in self.averaged)]

    def forget_round(self) -> None:
        """Forget the rows of the round, which their owners have."""
        self._of_round.clear()

    def forget_moments(self) -> None:
        """Zero lasting moments where one of a name is not finite."""
        for name in self._lasting.starts:
            moment = self._lasting.all_of(name)
            if not bool(moment.isfinite().all()):
                moment.zero_()
                self._lasting.starts[name].zero_()

    @contextmanager
    def in_own_form(self) -> Iterator[None]:
        """In the block, parameter and optimizer have the rows that lie here, and their averaged moments."""
        optimizer = self._holder()
        self.parameter.grad = None
        self.parameter.data = self.held.data
        state: dict[str, Any] = {} if optimizer is None else optimizer.state.get(self.parameter, {})
        state.update(self.moments if state else {})
        try:
            yield
        finally:
            for name in self.moments:
                state.pop(name, None)
            self.parameter.grad = None
            if self.table.here is self.held:  # else the fit has ended, and the rows stay in the parameter
                self.table.show_none()

    # What a checkpoint has of this rank.

    def lasting(self) -> dict[str, Any]:
        """Return the moments that stay with this rank, and the rows that they are of."""
        ids, slots = self._lasting.by_id()
        names = self._lasting.starts
        rows = {name: self._lasting.take(name, slots).cpu() for name in names}
        return {"ids": ids, "rows": rows, "starts": {name: start.cpu() for name, start in names.items()}}

    def take_lasting(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`lasting` returned."""
        if names := [name for name in state["starts"] if self._averages(name)]:
            raise ValueError(
                f"The checkpoint has {', '.join(names)} of each rank for the rows of an OwnedEmbedding, and this fit "
                "averages them: resume with average_optimizer= as it was."
            )
        self._lasting, device = GrowingRows(), self.held.device
        for name, start in state["starts"].items():
            self._lasting.declare(name, start.to(device, copy=True))
        self._lasting.add(state["ids"], {name: rows.to(device) for name, rows in state["rows"].items()})

    def take_moments(self, whole: Mapping[str, Tensor]) -> None:
        """Go on with moments of all rows, of which this rank takes what it needs, in the place of all that it has."""
        self.moments, self._lasting = {}, GrowingRows()
        first, last = self.table.rows_of_rank
        own = {name: rows for name, rows in whole.items() if not self._averages(name)}
        for name in whole.keys() - own.keys():
            self.moments[name] = whole[name][first:last].to(self.parameter, copy=True)
            self._of_round.declare(name, torch.zeros_like(self.held.data[:1]))
        if own:  # of a table that every rank held
            moved = torch.stack([(rows != 0).any(1) for rows in own.values()]).any(0)
            rows = {name: each[moved].to(self.parameter.dtype) for name, each in own.items()}
            starts = {name: torch.zeros_like(each[:1]) for name, each in own.items()}
            self.take_lasting({"ids": moved.nonzero().flatten(), "rows": rows, "starts": starts})

    def _kept(self, ids: Tensor) -> Tensor:
        """Return the slots of rows in this round; ask for those that are not here yet."""
        slots = self._of_round.slots(ids)
        if bool((is_new := slots < 0).any()):
            rows, *moments = ask_owners(self.table, ids[is_new], moments=True)
            found = dict(zip(sorted(self.moments), moments, strict=True))
            slots[is_new] = self._of_round.add(ids[is_new], {_ROW: rows, **found})
        return slots

    def _lend(self, optimizer: Optimizer, ids: Tensor, values: Tensor, gradient: Tensor | None) -> Tensor:
        """Let the parameter and its state be rows of these ids alone; return their slots."""
        of_round, lasting = self._kept(ids), self._lasting.slots_with(ids)
        self._step = _Step(optimizer, of_round, lasting, gradient)
        self.parameter.grad = None
        self.parameter.data = self._of_round.take(_ROW, of_round)
        places = torch.arange(len(ids), device=values.device)
        self.parameter.grad = of_rows(self.parameter, places, values)
        lent = {name: self._lasting.take(name, lasting) for name in self._lasting.starts}
        lent |= {name: self._of_round.take(name, of_round) for name in self._of_round.starts.keys() - {_ROW, _STEPS}}
        if lent:
            optimizer.state[self.parameter].update(lent)
        return of_round

    def _holder(self) -> Optimizer | None:
        """Return the optimizer that has the table; refuse a second one."""
        holders = [each for each in self._optimizers if holds(each, self.parameter)]
        if len(holders) > 1:
            raise ValueError(
                "Two optimizers hold the weight of one OwnedEmbedding, whose moments go with its rows from rank to "
                "rank: give it to one of them."
            )
        return holders[0] if holders else None

    def _store(self, name: str) -> GrowingRows:
        return self._of_round if self._averages(name) else self._lasting


def _taken(state: dict[str, Any], shape: torch.Size) -> dict[str, Tensor]:
    """Take out of an optimizer's state what has a row for each of a parameter of this shape."""
    names = [name for name, each in state.items() if isinstance(each, Tensor) and each.shape == shape]
    return {name: state.pop(name) for name in names}


def check_lasting(states: Sequence[object], num_tables: int) -> None:
    """Refuse what :meth:`ReplicaRows.lasting` returned of another number of tables."""
    if len(states) != num_tables:
        raise ValueError(
            f"The checkpoint has moments of {len(states)} OwnedEmbedding(s) on several ranks, and this fit trains "
            f"{num_tables}: resume with the tables that it was written with, or start from its weights "
            "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
        )


# Some rows of a table, of which there are more and more, in the memory of those that there are.


class GrowingRows:
    """Rows of several tensors, by id. A row has a slot, in the order in which rows came, which it keeps.

    Attributes:
        starts: By the name of each tensor, the row that an id has there before it gets one, of shape (1, ...).
    """

    def __init__(self) -> None:
        self.starts: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        """Forget all rows."""
        self._ids = torch.empty(0, dtype=torch.int64)  # increasing
        self._slots = self._ids  # of each of them
        self._tensors = {name: start[:0] for name, start in self.starts.items()}

    def declare(self, name: str, start: Tensor) -> None:
        """Add a tensor, in which all rows are ``start``, unless there is one of that name."""
        if name not in self.starts:
            self.starts[name] = start
            self._tensors[name] = start.repeat(len(self), *[1] * (start.dim() - 1))

    def slots(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, which increase; -1 where there is no row. All on the CPU."""
        if not len(self):
            return torch.full_like(ids, -1)
        places = torch.searchsorted(self._ids, ids).clamp_(max=len(self) - 1)
        return torch.where(self._ids[places] == ids, self._slots[places], -1)

    def add(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Add rows of ids that increase and have none; return their slots. Of a tensor left out they are its start."""
        first, count = len(self), len(ids)
        slots = torch.arange(first, first + count)
        is_new = torch.zeros(first + count, dtype=torch.bool)
        is_new[torch.searchsorted(self._ids, ids) + torch.arange(count)] = True
        self._ids, self._slots = _mixed(is_new, ids, self._ids), _mixed(is_new, slots, self._slots)
        for name, start in self.starts.items():
            tensor = self._tensors[name] = _grown(self._tensors[name], first, first + count)
            tensor[first : first + count] = rows.get(name, start)
        return slots

    def slots_with(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, which increase; those that have no row get the start."""
        slots = self.slots(ids)
        if bool((is_new := slots < 0).any()):
            slots[is_new] = self.add(ids[is_new], {})
        return slots

    def take(self, name: str, slots: Tensor) -> Tensor:
        """Return a copy of rows of a tensor."""
        tensor = self._tensors[name]
        return tensor.index_select(0, sent(slots, tensor.device))

    def put(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Replace rows of a tensor."""
        tensor = self._tensors[name]
        tensor.index_copy_(0, sent(slots, tensor.device), rows)

    def all_of(self, name: str) -> Tensor:
        """Return the rows of a tensor in the order of slots, in its memory."""
        return self._tensors[name][: len(self)]

    def by_id(self) -> tuple[Tensor, Tensor]:
        """Return all ids, increasing, and their slots."""
        return self._ids, self._slots

    def in_ranges(self, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return the ids that lie in some ranges, one behind the other, and their slots."""
        ends = torch.searchsorted(self._ids, torch.tensor(ranges)).tolist()
        ids, slots = (torch.cat([each[start:stop] for start, stop in ends]) for each in (self._ids, self._slots))
        return ids, slots


def _mixed(is_new: Tensor, new: Tensor, old: Tensor) -> Tensor:
    mixed = torch.empty(len(is_new), dtype=old.dtype)
    mixed[is_new], mixed[~is_new] = new, old
    return mixed


def _grown(tensor: Tensor, used: int, needed: int) -> Tensor:
    if needed <= len(tensor):
        return tensor
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    least = _LEAST_BYTES // row_bytes if tensor.device.type == "cpu" else 0
    grown = tensor.new_empty((max(needed, least, int(_GROWTH * len(tensor))), *tensor.shape[1:]))
    grown[:used] = tensor[:used]
    return grown
