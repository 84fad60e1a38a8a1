"""Rounds whose ranks may die and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.rounds import finite, frozen, refusals
from lightning_gnn_dist.rounds.base import RoundStrategy
from lightning_gnn_dist.rounds.clock import EveryPass
from lightning_gnn_dist.rounds.lightning_internals import (
    callback_states,
    load_callback_states,
    set_epoch,
    set_global_step,
)
from lightning_gnn_dist.rounds.meeting import Votes
from lightning_gnn_dist.wire.membership import LEFT, Elastic, Membership, Seat, check_available

_SECONDS_BETWEEN_CALLS = 0.2


class Row(NamedTuple):
    """What a rank says at a meeting."""

    batches: int
    stop: int
    global_step: int
    waits: int
    dealt_among: int
    premises: refusals.Premises


_NUM_NUMBERS = len(Row._fields) - 1 + len(refusals.Premises._fields)


def _numbers(row: Row) -> list[int]:
    return [*row[:-1], *row.premises]


def _read(numbers: list[int]) -> Row:
    """Undoes :func:`_numbers`, of a row that may go on."""
    batches, stop, global_step, waits, dealt_among, *premises = numbers[:_NUM_NUMBERS]
    return Row(batches, stop, global_step, waits, dealt_among, refusals.Premises(*premises))


class SoloEnvironment(ClusterEnvironment):
    """A rank that is alone as far as Lightning knows, whatever launcher started it.

    So none of Lightning's own exchanges can wait for a rank that is dead. Only a data module that is asked for a
    rank's part sees the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seat(0, 1)
        self._port = find_free_network_port()

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.seen.of

    def global_rank(self) -> int:
        return self.seen.place

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class ElasticRounds(RoundStrategy):
    """A strategy whose meeting is the average, held among those who are alive.

    A meeting is also where a rank joins: it takes the state of a live one, and its weight does not count. The
    parts are dealt anew whenever the members change. Every rank evaluates on its own, on everything, so an evaluation
    needs nobody; the first member writes the checkpoints.
    """

    elastic: Elastic | None = None
    _member: Membership | None = None
    _premises: refusals.Premises | None = None  # of the parts that were dealt last, among so many
    _dealt_among = 0
    _place = 0
    _told = 0

    def make_elastic(self, elastic: bool | Elastic) -> None:
        """Called by the constructor of a strategy that offers it."""
        if not isinstance(elastic, bool | Elastic):
            raise TypeError(f"elastic must be True, False or Elastic(...), got {shown(elastic)}.")
        if elastic is False:
            return
        check_available()
        self.elastic = Elastic() if elastic is True else elastic
        self.cluster_environment = SoloEnvironment()

    @property
    def is_global_zero(self) -> bool:
        return super().is_global_zero if self.elastic is None else self._place == 0

    def setup(self, trainer: Trainer) -> None:
        if self.elastic is not None and trainer.state.fn == TrainerFn.FITTING:
            refusals.check_elastic(trainer, self.drift)
        super().setup(trainer)

    def estimated_steps(self) -> float:
        if self.elastic is not None and isinstance(self.clock, EveryPass):
            refusals.refuse_estimate(self.clock, "parts, and so passes, change with the ranks that are alive")
        return super().estimated_steps()

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.elastic is None or not self._module().trainer.training:
            return super().process_dataloader(dataloader)
        # Lightning has restored everything, and fetches the first batch as soon as this returns.
        if self._member is None:
            self._member = Membership(self.elastic, self._shared_state, self._load_shared_state, self.round_idx)
        self._join(self.elastic)
        with self._seen_as(self._member.seat):
            return super().process_dataloader(self._dealt(dataloader))

    def meet(self, batches: int) -> list[Votes]:
        if self._member is None:
            return super().meet(batches)
        finite.check_alone(self._module().parameters())
        self.seconds_in_round = self._timer.end(batches)
        seat = self._member.seat
        rows = self._hold_meeting(batches)
        self.batches_done += batches
        set_epoch(self._module().trainer, self.round_idx, running=True)
        if self._member.seat != seat:
            assert self._round_loader is not None
            with self._seen_as(self._member.seat):
                self._round_loader.close()
                self._round_loader.loader = self._dealt(self._round_loader.loader)
        self.stop_requested = self.in_round = False
        # A rank that was told to end leaves alone: the others can do without it.
        return [
            Votes(row.batches, bool(row.stop), place == self._place and self.sigterm_received, 0, row.global_step)
            for place, row in enumerate(rows)
        ]

    def on_exception(self, exception: BaseException) -> None:
        if self.elastic is not None and isinstance(exception, SIGTERMException):
            exception.code = LEFT  # Lightning's own is 0, as if the training had come to its end
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None
        super().teardown()

    def _join(self, elastic: Elastic) -> None:
        """Take part from here on. Before the first round, those who are early hold meetings until all are there."""
        deadline = time.monotonic() + elastic.start
        while True:
            rows = self._hold_meeting(0, waits=time.monotonic() < deadline)
            if any(row.batches for row in rows) or len(rows) >= elastic.ranks or not all(row.waits for row in rows):
                return
            time.sleep(_SECONDS_BETWEEN_CALLS)

    def _hold_meeting(self, batches: int, *, waits: bool = False) -> list[Row]:
        """All who are alive come here: at the end of their round, or, with no batches, because they join."""
        assert self._member is not None
        trainer = self._module().trainer
        weight = 0.0 if not batches else float(batches) if self.weights == "steps" else self._weight()
        own = Row(
            batches,
            int(self.stop_requested),
            trainer.global_step,
            int(waits),
            self._dealt_among,
            self._premises or refusals.premises_of(trainer),
        )
        said = self._member.meet(self._tensors_to_average, weight, lambda: [*_numbers(own), *self._frozen_sums()])
        rows = [_read(row) for row in said]
        # Who was away has parts of another deal, and is about to get new ones.
        absent = [row.dealt_among != rows[0].dealt_among for row in rows]
        parts = rows[0].premises.parts
        refusals.check_same_premises(
            [
                row.premises._replace(parts=parts) if away else row.premises
                for row, away in zip(rows, absent, strict=True)
            ]
        )
        self.batches_of_ranks = [row.batches for row in rows]
        self.round_idx += any(self.batches_of_ranks)
        if not batches and (self._member.was_behind or any(self.batches_of_ranks)):
            set_epoch(trainer, self.round_idx, running=False)
        set_global_step(trainer, max(row.global_step for row in rows))
        self._place = rank_zero_only.rank = self._member.seat.place  # type: ignore[attr-defined]
        self._tell(len(rows))
        return rows

    def _frozen_sums(self) -> list[int]:
        return frozen.checksums(list(self._module().parameters()))

    def _tensors_to_average(self, rows: list[list[int]]) -> list[Tensor]:
        self._unequal = frozen.unequal([row[_NUM_NUMBERS:] for row in rows])
        return self._averaged_tensors()

    def _dealt(self, loader: Any) -> Any:
        """The training loader of this rank's part, now that it is known who takes part."""
        datamodule = self._datamodule()
        if not isinstance(datamodule, LightningDataModule):
            return loader  # the script's own, for this rank
        datamodule.teardown("fit")
        datamodule.setup("fit")
        assert self._member is not None
        self._premises, self._dealt_among = refusals.premises_of(self._module().trainer), self._member.seat.of
        return datamodule.train_dataloader()

    @contextmanager
    def _seen_as(self, seat: Seat) -> Iterator[None]:
        assert isinstance(self.cluster_environment, SoloEnvironment)
        self.cluster_environment.seen = seat
        try:
            yield
        finally:
            self.cluster_environment.seen = Seat(0, 1)

    def _shared_state(self) -> dict[str, Any]:
        trainer = self._module().trainer
        return {
            "module": self._module().state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self.lr_scheduler_configs],
            "callbacks": callback_states(trainer),
            "round_idx": self.round_idx,
            "global_step": trainer.global_step,
        }

    def _load_shared_state(self, state: dict[str, Any]) -> None:
        self._module().load_state_dict(state["module"])
        for optimizer, content in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        for config, content in zip(self.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(content)
        load_callback_states(self._module().trainer, state["callbacks"])
        self.round_idx = state["round_idx"]
        set_global_step(self._module().trainer, state["global_step"])

    def _tell(self, num_ranks: int) -> None:
        if num_ranks != self._told:
            self._told = num_ranks
            rank_zero_info(f"After round {self.round_idx}, {num_ranks} ranks take part.")
