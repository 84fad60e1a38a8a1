"""Rounds whose ranks may die and come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn

from lightning_gnn_dist.extensions.elastic.membership import Membership, Patience, Seat, check_available
from lightning_gnn_dist.joint import BringsHooks
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of, set_global_step
from lightning_gnn_dist.rounds.means import OuterStep
from lightning_gnn_dist.rounds.meeting import Meeting, Peers, Votes, contributed
from lightning_gnn_dist.rounds.meeting_hook import ReplicaState, hook_of
from lightning_gnn_dist.rounds.reducer import Reducer, check_alone
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.wire.addresses import HERE
from lightning_gnn_dist.wire.alike import Premises, check_same_premises, premises_of

_SECONDS_BETWEEN_CALLS = 0.2
_MAY_DIE = "With peers=Elastic() ranks may die at any time."


class Row(NamedTuple):
    """The numbers that a rank sends at a meeting."""

    batches: int
    stop: int
    global_step: int
    waits: int
    dealt_among: int
    graph: int  # from here on as in Premises
    arrays: int
    parts: int
    value: int
    other_value: int


class SoloEnvironment(LightningEnvironment):
    """Tells Lightning that this rank is alone, whatever launcher started it.

    So none of Lightning's own exchanges can wait for a rank that is dead. Only while the data module deals parts does
    it show the other ranks.
    """

    creates_processes_externally = True
    main_address = HERE
    seen = Seat(0, 1)

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


class LivingPeers(Peers):
    """Ranks that may die and come back: a meeting averages the replicas of those that are alive.

    A rank joins at a meeting: it takes the state of a live one, and its own replica has weight 0. The parts are dealt
    anew whenever the members change. Every rank evaluates on all nodes by itself, so an evaluation needs no other rank;
    the first member writes the checkpoints.

    Args:
        strategy: The strategy whose replicas are averaged. Each of its ranks is a process of its own.
        elastic: How long members wait for each other.
    """

    def __init__(self, strategy: RoundStrategy, elastic: Patience) -> None:
        check_available()
        refusals.refuse_all(_MAY_DIE, _against_rounds(strategy))
        self._rounds, self._elastic = strategy, elastic
        self._world = SoloEnvironment()
        strategy.cluster_environment = self._world
        self._member: Membership | None = None
        self._premises: Premises | None = None  # of the parts that were dealt last, among _dealt_among ranks
        self._dealt_among = self._place = self._told = 0

    may_change = True

    @property
    def are_several(self) -> bool:
        return True

    def is_first(self, rank: int) -> bool:
        return self._place == 0

    def check(self, trainer: Trainer) -> None:
        refusals.refuse_all(_MAY_DIE, _against(trainer, self._rounds.drift))
        refuse_states(trainer.lightning_module, self._rounds.states)
        data = datamodule_of(trainer)
        if isinstance(data, BringsHooks) and data.meeting_hooks():
            raise ValueError(
                "boundary=History() has all ranks compute rows together, and with peers=Elastic() ranks may die at any "
                "time: use boundary=Halo()."
            )

    def join(self, loader: Any, opened: Callable[[Any], Any]) -> Any:
        # Lightning has restored everything, and fetches the first batch as soon as this returns.
        if self._member is None:
            round_idx = self._rounds.state.round_idx
            resumed = self._rounds.resumed_state
            if (outer := self._outer()) is not None and "outer" in resumed:
                outer.restore({"outer": resumed.pop("outer")})  # now: a rank that joins may take it from here
            self._member = Membership(self._elastic, self._shared_state, self._load_shared_state, round_idx)
        self._wait_for_all()
        if (outer := self._outer()) is not None:
            outer.begin_round()
        with self._seen_as(self._member.seat):
            return opened(self._dealt(loader))

    def _module(self) -> LightningModule:
        module = self._rounds.lightning_module
        assert module is not None
        return module

    def meet(
        self, meeting: Meeting, batches: int, end_round: Callable[[], None], *, is_told_to_end: bool
    ) -> list[Votes]:
        assert self._member is not None
        check_alone(self._module().parameters())
        seat = self._member.seat
        rows = self._hold_meeting(batches)
        _set_epoch(self._module().trainer, self._rounds.state.round_idx, running=True)
        if self._member.seat != seat:
            loader = self._rounds.loader
            assert loader is not None
            with self._seen_as(self._member.seat):
                loader.close()
                loader.loader = self._dealt(loader.loader)
        # A rank that was told to end leaves alone: the others can do without it.
        return [
            Votes(row.batches, row.batches, bool(row.stop), place == self._place and is_told_to_end, 0, row.global_step)
            for place, row in enumerate(rows)
        ]

    def leave(self) -> None:
        if self._member is not None:
            self._member.leave()
            self._member = None

    def _wait_for_all(self) -> None:
        """Hold meetings before the first round until all ranks are there, or ``elastic.start`` seconds are over."""
        deadline = time.monotonic() + self._elastic.start
        while True:
            rows = self._hold_meeting(0, waits=time.monotonic() < deadline)
            if any(row.batches for row in rows) or len(rows) >= self._elastic.ranks or not all(r.waits for r in rows):
                return
            time.sleep(_SECONDS_BETWEEN_CALLS)

    def _hold_meeting(self, batches: int, *, waits: bool = False) -> list[Row]:
        """Meet all live ranks, at the end of a round, or with ``batches=0`` to join. Returns what each rank said."""
        assert self._member is not None
        strategy, state, trainer = self._rounds, self._rounds.state, self._module().trainer
        own = Row(
            batches,
            int(state.stop_requested),
            trainer.global_step,
            int(waits),
            self._dealt_among,
            *(self._premises or premises_of(datamodule_of(trainer))),
        )
        said = self._member.meet(
            self._tensors_to_average,
            self._weight(batches),
            lambda: [*own, *strategy.meeting.parameters.checksums()],
        )
        rows = [Row(*numbers[: len(own)]) for numbers in said]
        _check_premises(rows)
        for hook in strategy.meeting.hooks if any(row.batches for row in rows) else []:
            hook.apply()
        state.batches_of_ranks = [row.batches for row in rows]
        state.round_idx += any(state.batches_of_ranks)
        if not batches and (self._member.was_behind or any(state.batches_of_ranks)):
            _set_epoch(trainer, state.round_idx, running=False)
        set_global_step(trainer, max(row.global_step for row in rows))
        self._place = rank_zero_only.rank = self._member.seat.place  # type: ignore[attr-defined]
        self._tell(len(rows))
        return rows

    def _weight(self, batches: int) -> float:
        """Return this rank's weight in the average, 0 if it joins."""
        if not batches or self._rounds.weights == "steps":
            return float(batches)
        return self._rounds.own_weight()

    def _tensors_to_average(self, rows: list[list[int]]) -> list[Tensor]:
        """Return what is averaged, anew at each attempt: the rank may have been behind."""
        self._rounds.meeting.parameters.compare([row[len(Row._fields) :] for row in rows])
        groups = contributed(self._rounds.meeting.hooks)
        return [each for name in ("pseudo_gradients", "whole", "moments") for each in groups.get(name, ())]

    def _outer(self) -> OuterStep | None:
        return hook_of(self._rounds.meeting.hooks, OuterStep)

    def _dealt(self, loader: Any) -> Any:
        """Return the training loader of this rank's part among the ranks that take part now."""
        datamodule = datamodule_of(self._module().trainer)
        if not isinstance(datamodule, LightningDataModule):
            return loader  # the script's own, for this rank
        datamodule.teardown("fit")
        datamodule.setup("fit")
        assert self._member is not None
        self._premises, self._dealt_among = premises_of(datamodule_of(self._module().trainer)), self._member.seat.of
        return datamodule.train_dataloader()

    @contextmanager
    def _seen_as(self, seat: Seat) -> Iterator[None]:
        self._world.seen = seat
        try:
            yield
        finally:
            self._world.seen = Seat(0, 1)
            trainer = self._module().trainer
            if isinstance(data := datamodule_of(trainer), LightningDataModule):
                data.trainer = trainer  # which evaluates alone from here on

    def _shared_state(self) -> dict[str, Any]:
        trainer = self._module().trainer
        return {
            "module": self._module().state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._rounds.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self._rounds.lr_scheduler_configs],
            "callbacks": call._call_callbacks_state_dict(trainer),
            "round_idx": self._rounds.state.round_idx,
            "global_step": trainer.global_step,
            "outer": {} if (outer := self._outer()) is None else outer.shared_state(),
        }

    def _load_shared_state(self, state: dict[str, Any]) -> None:
        self._module().load_state_dict(state["module"])
        for optimizer, content in zip(self._rounds.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        for config, content in zip(self._rounds.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(content)
        call._call_callbacks_load_state_dict(self._module().trainer, {"callbacks": state["callbacks"]})
        if (outer := self._outer()) is not None:
            outer.restore(state["outer"])
        self._rounds.state.round_idx = state["round_idx"]
        set_global_step(self._module().trainer, state["global_step"])

    def _tell(self, num_ranks: int) -> None:
        if num_ranks != self._told:
            self._told = num_ranks
            rank_zero_info(f"After round {self._rounds.state.round_idx}, {num_ranks} ranks take part.")


def _check_premises(rows: list[Row]) -> None:
    """Refuse ranks with other data. Parts of another deal are not compared: their rank is about to get new ones."""
    first, found = rows[0], [Premises(*row[-len(Premises._fields) :]) for row in rows]
    of_one_deal = [row.parts if row.dealt_among == first.dealt_among else first.parts for row in rows]
    check_same_premises([each._replace(parts=parts) for each, parts in zip(found, of_one_deal, strict=True)])


@dataclass(frozen=True)
class Elastic(Patience):
    """Ranks that may die and come back, given to a strategy as ``peers``, and how long they wait for each other.

    Args:
        patience: Seconds to wait for a quorum before the rank gives up. Longer than a round and its validation: a rank
            that comes back waits for the next meeting of the others.
        timeout: Seconds that one exchange may take. After that it is tried again, without those who are gone.
        attempts: How often in a row an exchange is tried again before the rank gives up.
        ranks: How many ranks to wait for before the first round; later ones join at a meeting. Default: as many as the
            launcher started; without it, the first quorum.
        start: Seconds to wait for these ranks, at most.
    """

    def peers_of(self, strategy: RoundStrategy) -> LivingPeers:
        """Return the ranks that are alive, as those who meet in the fits of a strategy."""
        return LivingPeers(strategy, self)


def refuse_states(module: nn.Module, states: Sequence[ReplicaState]) -> None:
    """Refuse what ranks do not have alike: a meeting that is held again averages whole parameters."""
    for state in states:
        state.refuse_replicas("TMAStrategy(peers=Elastic())")
        rows = state.rows()
        if names := [rows[id(each)] for each in module.parameters() if each.requires_grad and id(each) in rows]:
            raise ValueError(
                f"{names[0]} has sparse gradients, and with peers=Elastic() ranks average whole parameters: make it "
                "with sparse=False, or leave peers out."
            )


def _against(trainer: Any, drift: object) -> Iterator[str]:
    """Yield why ranks that may die would exchange outside meetings under these settings, or name files differently."""
    if trainer.num_devices * trainer.num_nodes != 1:
        yield (
            f"devices={trainer.num_devices}: every rank is a process of its own, so use devices=1, num_nodes=1 and "
            "start as many processes as ranks (lightning-gnn-dist elastic --ranks 4 -- python train.py)."
        )
    if drift is not None:
        yield f"drift={drift} exchanges between meetings: leave it out."
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging):
            yield "WeightAveraging keeps weights that a rank which comes back cannot get: leave it out."
        is_saver = isinstance(callback, ModelCheckpoint)
        if is_saver and (callback.dirpath is None or callback._enable_version_counter):
            yield (
                "ModelCheckpoint must name files alike on all ranks, whoever writes them: use "
                "ModelCheckpoint(dirpath=..., enable_version_counter=False), or enable_checkpointing=False."
            )


def _set_epoch(trainer: Trainer, epochs: int, *, running: bool) -> None:
    """Set Lightning's count of begun epochs to ``epochs``; the last is still running or not."""
    for progress in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
        progress.ready = progress.started = epochs  # type: ignore[attr-defined]
        progress.processed = progress.completed = epochs - running  # type: ignore[attr-defined]
    trainer.fit_loop.restarting = False  # what a checkpoint said of where the epoch stood is out of date


def _against_rounds(strategy: RoundStrategy) -> Iterator[str]:
    """Yield why rounds need all ranks."""
    if type(strategy.reducer) is not Reducer:
        yield (
            "A mean that a dead rank does not finish is taken again by the others, of numbers as they are: leave the "
            "reducer out."
        )
    if strategy.nonfinite != "refuse":
        yield (
            f"nonfinite={strategy.nonfinite!r} keeps a rank that has NaN, which here ends and comes back: leave it out."
        )
