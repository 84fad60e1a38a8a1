"""The meeting of ranks at the end of a round, and the callback that calls it: strategies have no hook there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds import checkpoints, refusals
from lightning_gnn_dist.rounds.lightning_internals import announce_sigterm, datamodule_of, log_numbers, set_global_step
from lightning_gnn_dist.rounds.means import Parameters, forget_moments
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import are_finite, leave_out_, length_of, refuse_weights
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.alike import odd_ones
from lightning_gnn_dist.wire.collectives import checksum

# What rounds call; no hook is called for what it does not do.
_IN_ROUNDS = ("begin_round", "set_out", "before_step", "after_step", "sizes", "trained", "contribute", "apply", "equal")


class Votes(NamedTuple):
    """The numbers that a rank sends at a meeting: its batches, what it wants, a checksum of its replica.

    ``gradients`` are those that it has computed since the meeting before, of its batches and beyond them.
    """

    batches: int
    gradients: int
    stop: int
    sigterm: int
    checksum: int
    global_step: int


class Meeting:
    """What the replicas of a fit do about each other: its hooks, of which there are none before :meth:`begin`."""

    fit: Fit
    parameters: Parameters

    def __init__(self) -> None:
        self.hooks: Sequence[MeetingHook] = []
        self.has_taken_first = False  # where processors differ, and said so

    def begin(self, fit: Fit, hooks: Sequence[MeetingHook]) -> None:
        """Begin a fit. Collective.

        Args:
            fit: What the hooks see.
            hooks: All of them. Those that go on from a mean come behind those that make it.
        """
        self.fit, self.hooks = fit, hooks
        (self.parameters,) = (hook for hook in hooks if isinstance(hook, Parameters))
        self._having = {name: [hook for hook in hooks if _has(hook, name)] for name in _IN_ROUNDS}
        for hook in hooks:
            hook.begin(fit)

    def tell(self, name: str, *args: Any) -> None:
        """Call a method of the hooks that have it."""
        for hook in self._having[name]:
            getattr(hook, name)(*args)

    def ask(self, name: str) -> list[Any]:
        """Return what this method of the hooks returns, one behind the other."""
        return [each for hook in self._having[name] for each in getattr(hook, name)()]

    def exchange(self) -> None:
        """Make one mean of what all hooks contribute, from which each goes on. Collective."""
        fit, groups = self.fit, contributed(self._having["contribute"])
        weight = fit.weight()
        if fit.round.is_left_out:
            weight = leave_out_(chain.from_iterable(groups.values()))
            forget_moments(fit.optimizers)  # those that are its own are NaN, too
        fit.reducer.mean_(groups, weight)
        for hook in self._having["apply"]:
            if fit.round.has_mean or not hook.follows_mean:
                hook.apply()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank; refuse two hooks that give it one name."""
        found: dict[str, Any] = {}
        for hook in self.hooks:
            state = hook.state()
            if both := state.keys() & found.keys():
                raise ValueError(
                    f"Two hooks of meetings have a state named {min(both)!r}, the second of them {type(hook).__name__}"
                    ", and a checkpoint keeps one of a name: return the state of one of them under another."
                )
            found |= state
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin the round that a checkpoint is of. Collective."""
        for hook in self.hooks:
            hook.restore(state)

    def finish(self) -> None:
        """Take in what is under way behind the last meeting, and go on from it. Collective."""
        if sum(hook.finish() for hook in self.hooks):
            self.fit.reducer.begin_meeting(self.fit.round.round_idx)
            for hook in self._having["apply"]:
                if hook.follows_mean:
                    hook.apply()

    def end(self) -> None:
        """End the fit. Not collective."""
        for hook in self.hooks:
            hook.end()


def _has(hook: MeetingHook, name: str) -> bool:
    return getattr(type(hook), name) is not getattr(MeetingHook, name)


def contributed(hooks: Iterable[MeetingHook]) -> dict[str, list[Tensor]]:
    """Return what hooks bring to one mean, by name. Collective."""
    groups: dict[str, list[Tensor]] = {}
    for hook in hooks:
        for name, tensors in hook.contribute().items():
            groups.setdefault(name, []).extend(tensors)
    return groups


class Peers:
    """Who meets: all ranks of the process group, none of which may be missing.

    Whoever meets otherwise overrides what differs.
    """

    may_change = False  # whether ranks may leave and come, each by itself, and parts are then dealt anew

    @property
    def are_several(self) -> bool:
        """Whether there can be others to meet."""
        return collectives.world_size() > 1

    def is_first(self, rank: int) -> bool:
        """Return whether a rank writes the files that only one rank writes."""
        return rank == 0

    def check(self, trainer: Trainer) -> None:
        """Refuse a fit that these ranks cannot train."""

    def join(self, loader: Any, opened: Callable[[Any], Any]) -> Any:
        """Take part from here on. Returns what ``opened`` makes of this rank's training loader."""
        return opened(loader)

    def meet(
        self, meeting: Meeting, batches: int, end_round: Callable[[], None], *, is_told_to_end: bool
    ) -> list[Votes]:
        """Compare, exchange, count the round, and return what each rank said. Collective.

        Args:
            meeting: The hooks that meet.
            batches: This rank's number in the round.
            end_round: What ranks exchange, after which they are equal.
            is_told_to_end: Whether this rank has received SIGTERM.
        """
        fit, state, counts = meeting.fit, meeting.fit.round, _compare(meeting, batches)
        state.left_out = [rank for rank, count in enumerate(counts) if count < 0]
        state.is_left_out = bool(state.left_out) and collectives.rank() in state.left_out
        if state.left_out and (fit.nonfinite == "refuse" or len(state.left_out) == len(counts)):
            refuse_weights(state.left_out, state.round_idx)
        state.batches_of_ranks = [abs(count) for count in counts]
        end_round()
        votes = _vote(meeting, batches, is_told_to_end)
        if len({vote.checksum for vote in votes}) > 1:
            if fit.processors_differ:
                if not meeting.has_taken_first:
                    rank_zero_info(checkpoints.TAKES_FIRST)
                meeting.has_taken_first = True
                checkpoints.take_first_(meeting.ask("equal"))
                votes = _vote(meeting, batches, is_told_to_end)
            if odd := odd_ones([vote.checksum for vote in votes]):  # the same on all ranks: all raise or none
                raise RuntimeError(
                    f"After the meeting of round {state.round_idx} the replicas of ranks {odd} differ from that of "
                    "rank 0, by more than processors of different kinds explain. What runs at a meeting must do the "
                    "same on all ranks: look for an end_round() that does not call average_replicas(), or a hook that "
                    "acts on some ranks only, draws random numbers, or whose results vary from call to call."
                )
        state.round_idx += 1
        state.gradients_beyond = 0
        return votes

    def leave(self) -> None:
        """Called when the fit is over."""


def _compare(meeting: Meeting, batches: int) -> list[int]:
    """Return each rank's batches, negative if its replica is not finite; refuse ranks that send other sizes."""
    fit, several = meeting.fit, collectives.world_size() > 1
    sizes = meeting.ask("sizes")
    if any(hook.averages_gradients for hook in meeting.hooks):
        sizes += [length_of(fit.dense_parameters()), length_of(fit.trained_parameters())]
    sums = meeting.parameters.checksums() if several else []
    is_finite = are_finite(meeting.ask("trained"))
    count, summary = batches if is_finite else -batches, zlib.crc32(repr([*sizes, *sums]).encode())
    parameters = len(list(fit.lightning_module.parameters()))
    rows = collectives.gather_numbers([count, sum(sizes), parameters, summary], fit.device)
    for of_ranks in ([row[1] for row in rows], [row[2] for row in rows]):
        if len(set(of_ranks)) > 1:
            refusals.check_sizes(of_ranks)
    all_equal = len({row[-1] for row in rows}) == 1
    fit.reducer.begin_meeting(fit.round.round_idx, sizes if all_equal else [])
    meeting.parameters.unequal.clear()
    if not all_equal:
        meeting.parameters.compare(collectives.gather_numbers(sums, fit.device))
    return [row[0] for row in rows]


def _vote(meeting: Meeting, batches: int, is_told_to_end: bool) -> list[Votes]:
    """Return what each rank says at the end of a round. Collective."""
    equal = checksum(meeting.ask("equal")) if collectives.world_size() > 1 else 0
    steps = meeting.fit.lightning_module.trainer.global_step
    state = meeting.fit.round
    mine = Votes(batches, batches + state.gradients_beyond, state.stop_requested, is_told_to_end, equal, steps)
    return [Votes._make(numbers) for numbers in collectives.gather_numbers(mine, meeting.fit.device)]


@runtime_checkable
class GathersPeers(Protocol):
    """What a user passes to say who meets."""

    def peers_of(self, strategy: Any) -> Peers:
        """Return who meets in the fits of a strategy of rounds; refuse a strategy that does not go with them."""


class MeetingCallback(Callback):
    """Calls the meeting of a strategy after the last batch of a round, and lets no rank leave before."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.min_epochs: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.min_epochs = trainer.fit_loop.min_epochs

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One rank that stops in mid-round would leave the others waiting at the meeting. Lightning finishes an
        # epoch that min_epochs asks for, so a stop takes effect at its end, after the vote.
        running = trainer.fit_loop.epoch_progress.current.processed + 1  # type: ignore[attr-defined]
        trainer.fit_loop.min_epochs = max(running, self.min_epochs or 0)

    def on_train_batch_start(self, *args: Any) -> None:
        state = self.strategy.state
        if not state.in_round:
            self.strategy.meeting.tell("set_out")
            state.in_round = state.is_training = True
            self.strategy.timer.begin()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # After mixed precision has unscaled the gradients, and before they are clipped.
        self.strategy.meeting.tell("before_step", optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.is_last_batch:
            return
        strategy, state = self.strategy, self.strategy.state
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        state.stop_requested |= trainer.should_stop
        state.seconds, state.is_training = strategy.timer.end(batches), False
        told = strategy.sigterm_received
        votes = strategy.peers.meet(strategy.meeting, batches, strategy.end_round, is_told_to_end=told)
        state.batches_done += batches
        state.stop_requested = False
        strategy.meeting.tell("begin_round")
        state.in_round = False  # last: what fails before this leaves no checkpoint that could be resumed
        # ModelCheckpoint names files by it and decides by it whether to save; ranks may have taken unequal steps.
        if (steps := max(vote.global_step for vote in votes)) != trainer.global_step:
            set_global_step(trainer, steps)
        if any(vote.stop for vote in votes):
            trainer.should_stop = True
        if any(vote.sigterm for vote in votes):
            rank_zero_info(f"SIGTERM: stopping after round {state.round_idx}.")
            announce_sigterm(trainer)
        log_figures(
            pl_module,
            {
                "round/index": float(state.round_idx),
                "round/batches": float(sum(vote.batches for vote in votes)),
                "round/gradients": float(sum(vote.gradients for vote in votes)),
                "round/seconds": state.seconds,
            },
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.strategy.state.in_round:
            raise RuntimeError(
                "The epoch ended without a meeting. A hook on_train_batch_start that returns -1 leaves it early: end "
                "rounds by the strategy's clock instead."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.strategy.meeting.finish()  # before an average of weights takes the place of the model
        trainer.fit_loop.min_epochs = self.min_epochs


def log_figures(module: LightningModule, figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Log the bytes that this rank sent in the fit, the seconds it waited, and ``figures``. Not collective."""
    of_data = getattr(datamodule_of(module.trainer), "figures", {})
    log_numbers(module, {**figures, **collectives.traffic.figures, **of_data})
