"""What a meeting is made of: hooks, each of which does one thing that replicas do about each other.

begin         once, when a fit begins
begin_round   before the first round, and after each meeting: what begins a round on all ranks
set_out       before the first local step of a round, behind validation and checkpoints
before_step   in each local step: what changes its gradients, without an exchange
contribute    at a meeting: what goes into the mean over ranks, one exchange for all hooks
apply         after it: what becomes of the mean
finish        once, behind the last meeting
end           once, when the fit is over

A strategy says which hooks meet, and in which order: those that go on from the mean come behind those that make it. A
method that a hook does not have is never called. What is off is not among them. What ranks do not have alike is a
:class:`ReplicaState`, which a module of the user's brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.reducer import Groups, Reducer


@dataclass
class RoundState:
    """Where a rank is in the rounds of a run, and how the last one was. A checkpoint holds the first two fields."""

    round_idx: int = 0
    batches_done: int = 0
    in_round: bool = False
    is_training: bool = False  # from the first batch of a round to its meeting
    has_mean: bool = True  # whether the meeting has taken in a mean, from which hooks go on
    others_wait: bool = False  # for what this rank computes alone
    stop_requested: bool = False  # by this rank, since the last meeting
    gradients_beyond: int = 0  # computed since the last meeting by anchors and corrections
    seconds: float = 0.0
    batches_of_ranks: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # ranks whose weights were not finite
    is_left_out: bool = False  # whether this rank's replica must not count at this meeting


@dataclass(frozen=True)
class Fit:
    """What a hook may see of a fit; never the strategy.

    Attributes:
        lightning_module: The module that trains.
        optimizers: Those of its local steps.
        precision_plugin: Lightning's, whose ``train_step_context()`` a step outside the loop needs.
        batch_to_device: Moves a batch to where the module is.
        round: Where this rank stands.
        reducer: Takes means over ranks.
        weight: Says what this rank counts for in them.
        weight_of_rows: Says what a local step of it counts for in the mean of a row that it has touched.
        nonfinite: What to do with a rank whose weights or gradients are not finite.
        processors_differ: Whether ranks compute on processors of different kinds, so that last digits may differ.
        states: What ranks do not have alike.
        device: Where the module is.
    """

    lightning_module: LightningModule
    optimizers: list[Optimizer]
    precision_plugin: Precision
    batch_to_device: Callable[[Any], Any]
    round: RoundState
    reducer: Reducer
    weight: Callable[[], float]
    weight_of_rows: Callable[[], float]
    nonfinite: str
    processors_differ: bool
    states: Sequence[ReplicaState]
    device: torch.device

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The names of parameters and buffers that no broadcast, mean or comparison touches."""
        return frozenset().union(*(state.excluded() for state in self.states))

    @cached_property
    def rows(self) -> dict[int, str]:
        """The names of weights whose gradients have some rows alone, trained or not, by ``id()``."""
        return dict(chain.from_iterable(state.rows().items() for state in self.states))

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters that ranks train together, in the same order on every rank."""
        return [
            each
            for name, each in self.lightning_module.named_parameters()
            if each.requires_grad and (name not in self.excluded or id(each) in self.rows)
        ]

    def dense_parameters(self, *, frozen: bool = False) -> list[Tensor]:
        """Return the parameters that are trained, or also ``frozen`` ones, and go whole: alike on all ranks."""
        return [
            each
            for name, each in self.lightning_module.named_parameters()
            if (frozen or each.requires_grad) and id(each) not in self.rows and name not in self.excluded
        ]

    def buffers(self) -> list[Tensor]:
        """Return the buffers that all ranks have."""
        return [each for name, each in self.lightning_module.named_buffers() if name not in self.excluded]

    def names_of_rows(self) -> list[str]:
        """Return the names of trained weights whose gradients have some rows alone."""
        return [self.rows[id(each)] for each in self.trained_parameters() if id(each) in self.rows]


class MeetingHook:
    """One thing that replicas do about each other. All ranks have the same hooks, in the same order.

    Every method may be left out. Those that say so are called on all ranks at once, and may exchange.
    """

    fit: Fit
    looks_beyond_parts = False  # whether it puts right what averages of unlike parts lose
    averages_gradients = False  # whether it averages gradients of all that trains, or what goes in their place
    follows_mean = False  # whether it goes on from a mean, and waits where a reducer takes that in later

    def begin(self, fit: Fit) -> None:
        """Begin a fit, whose module and optimizers are made; refuse one that does not go with it. Collective."""
        self.fit = fit

    def begin_round(self) -> None:
        """Begin a round: after each meeting, and before the first. Collective."""

    def set_out(self) -> None:
        """Let this rank's replica go where it trains from, after validation and checkpoints. Not collective."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Change the gradients that an optimizer is about to use, before they are clipped. Not collective."""

    def after_step(self) -> None:
        """Undo what :meth:`before_step` needs undone, also where the optimizer has not stepped. Not collective."""

    def contribute(self) -> Groups:
        """Return what goes into the mean over ranks, by name. Collective: what does not go there may go before."""
        return {}

    def apply(self) -> None:
        """Take what the mean has become. Collective."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank, by names that no other hook has."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin the round that a checkpoint is of; ``state`` has the states of all hooks. Collective."""
        self.begin_round()

    def finish(self) -> bool:
        """Take in what is still under way behind the last meeting; return whether anything was. Collective."""
        return False

    def end(self) -> None:
        """End the fit, also after an error. Not collective."""

    def members(self) -> list[MeetingHook]:
        """Return the hook, and those that it holds."""
        return [self]

    # What ranks compare.

    def sizes(self) -> list[int]:
        """Return how many numbers it sends, in which ranks must agree before they meet."""
        return []

    def trained(self) -> list[Tensor]:
        """Return what local steps have moved on this rank, in which there must be no NaN."""
        return []

    def equal(self) -> list[Tensor]:
        """Return what all ranks have alike after a meeting, which is checked."""
        return []


class ReplicaState:
    """What ranks do not have alike of a module, or do not exchange as a whole, in a call of the trainer.

    Every method may be left out. Those that say so are called on all ranks at once, and may exchange.
    """

    maps_files = False  # whether a rank reads a part of a checkpoint alone, so that the file is mapped

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers that do not take its gradients."""

    def refuse_replicas(self, what: str) -> None:
        """Refuse it for ``what``, where each rank must have all of it."""

    def divide(self, device: torch.device) -> None:
        """Keep what is this rank's, unless it has. Before a checkpoint is read, and before optimizers. Collective."""

    def excluded(self) -> set[str]:
        """Return the names of parameters and buffers that no DDP, broadcast, mean or comparison touches."""
        return set()

    def rows(self) -> dict[int, str]:
        """Return the names of weights whose gradients have some rows alone, trained or not, by ``id()``."""
        return {}

    def begin_fit(self, optimizers: Sequence[Optimizer], precision: Precision) -> None:
        """Begin a fit, whose optimizers are made; refuse those, and callbacks, that do not go with it."""

    def have_changed(self) -> None:
        """Note that all ranks have stepped what they have."""

    def leave(self, *, at_once: bool, stays: bool, gathers: bool) -> None:
        """End a fit or an evaluation. Not collective.

        Args:
            at_once: Whether others may wait for what this rank does not do any more: then it waits for no other's end.
            stays: Whether this process goes on.
            gathers: Whether the process that started this one gets the model from it.
        """

    # In rounds.

    def hooks(self, averages: Callable[[str], bool]) -> Sequence[MeetingHook]:
        """Return what takes part in meetings; ``averages`` says whether ranks average a moment of optimizers."""
        return []

    def average_gradients_(self, parameters: Sequence[Tensor], gradients: list[Tensor], weight: float) -> None:
        """Replace its gradients among those of ``parameters`` by means over ranks. Collective."""

    # Where ranks exchange gradients at every step.

    def begin_exchange(self, strategy: str, *, has_others: bool) -> None:
        """Begin to exchange the gradients of :meth:`rows`, which DDP leaves alone, as rank 0 has these. Collective.

        Args:
            strategy: The strategy's name, for errors.
            has_others: Whether other parameters train, which DDP needs.
        """

    def begin_batch(self) -> None:
        """Note that a batch begins on all ranks, whether or not the optimizer has stepped after the one before."""

    def exchange_gradients(self, *, steps_next: bool) -> bool:
        """Replace its gradients by means over ranks, after a backward pass. Collective.

        Args:
            steps_next: Whether the optimizer steps next.

        Returns whether those are finite that lie on one rank each.
        """
        return True

    # In checkpoints.

    def model_state(self, get: Callable[[], dict[str, Any]], *, is_alone: bool) -> dict[str, Any]:
        """Return the state of the module from ``get``, on a rank that writes no checkpoint, or is alone."""
        return get()

    def optimizer_state(self, get: Callable[[], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer from ``get``, as the checkpoint has it for all ranks. Not collective."""
        return get()

    def own_states(self, states: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return this rank's states of optimizers, of those in a checkpoint."""
        return states


Kind = TypeVar("Kind", bound=MeetingHook)


def hook_of(hooks: Iterable[MeetingHook], kind: type[Kind]) -> Kind | None:
    """Return the hook of a class, None where it is off."""
    return next((each for hook in hooks for each in hook.members() if isinstance(each, kind)), None)
