r"""Means that travel while the next round trains (Streaming DiLoCo, Douillard et al., arXiv:2501.18512).

With :math:`G_r` the shared model, the same on all ranks, and :math:`\delta_{r,p}` how far rank :math:`p` moves in the
local steps of round :math:`r`,

.. math::
    \theta_{r,p} = G_r + \delta_{r-1,p} \quad\text{begins the round, and}\qquad
    G_{r+1} = \mathrm{outer}\Bigl(G_r,\, \sum_p w_p\, \delta_{r-1,p}\Bigr) \quad\text{is known at its meeting:}

the mean of a round is sent while the next one trains, and is taken in at the meeting behind that. A replica keeps what
it has learned meanwhile: :math:`\theta_{r+1,p}` is its last weights, and the mean in the place of what it had sent. The
mean is taken in there even if it has come long before, so that nothing depends on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.rounds.means import AveragedMoments, OuterStep
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups, leave_out_
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Background

THREAD_NAME = "means"


@dataclass
class Load:
    """What a rank sends of a round, in RAM, as a checkpoint holds it until it is taken in.

    Attributes:
        places: The numbers of the parameters that were trained.
        pseudo_gradients: Of these.
        moments: Of the optimizers.
        weight: What the rank counts for, 0 where it was left out.
        number: That of the means, which decides how they are rounded.
        lost: What rounding had left of the loads before.
    """

    places: list[int]
    pseudo_gradients: list[Tensor]
    moments: list[Tensor]
    weight: float
    number: int
    lost: list[Tensor] = field(default_factory=list)


class Sends(Protocol):
    """What sends what a rank has packed."""

    def reserve(self, count: int) -> int: ...
    def later(
        self, pseudo_gradients: Sequence[Tensor], moments: Sequence[Tensor], weight: float, number: int
    ) -> Callable[[], None]: ...
    def lost(self) -> list[Tensor]: ...


class Overlap(MeetingHook):
    """The step of the meetings, and the means of moments, a round late. It comes behind what makes means at once.

    Args:
        means: Sends what a rank has packed.
        outer: Takes the step.
        moments: The moments of optimizers that are averaged, if any.
    """

    averages_gradients = True

    def __init__(self, means: Sends, outer: OuterStep, moments: AveragedMoments | None) -> None:
        self._sends, self._outer, self._moments = means, outer, moments
        self._thread: Background | None = None
        self._load: Load | None = None  # what is under way
        self._targets: list[Tensor] = []  # where the means of its moments go
        self._means: tuple[list[Tensor], list[Tensor]] = [], []  # of its pseudo-gradients and moments
        self._sent: Future[None] = Future()
        self._taken: list[Tensor] = []  # the moments that this meeting has made equal

    def members(self) -> list[MeetingHook]:
        return [self, self._outer, *([] if self._moments is None else [self._moments])]

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        for each in self.members()[1:]:
            each.begin(fit)

    def begin_round(self) -> None:
        self._outer.begin_round()
        if self._load is not None:
            self._send(self._load)

    def set_out(self) -> None:
        self._outer.go_ahead(self._ahead())

    @torch.no_grad()
    def contribute(self) -> Groups:
        """Pack what the round has brought, and take in the mean of the one before. The model is the shared one."""
        load, targets = self._packed(), self._tensors_of_moments()
        self.fit.round.has_mean = self.finish()
        self._outer.go_back()
        load.lost = [*self._sends.lost()]
        self._load, self._targets = load, targets
        return {}

    @torch.no_grad()
    def finish(self) -> bool:
        self._taken = []
        if (load := self._load) is None:
            return False
        with collectives.counted(0.0):
            self._sent.result()
        self._load, (pseudo_gradients, moments) = None, self._means
        means = {place: each.to(self.fit.device) for place, each in zip(load.places, pseudo_gradients, strict=True)}
        self._outer.take(means)
        for target, mean in zip(self._targets, moments, strict=True):
            target.copy_(mean)
        self._taken = self._targets
        return True

    def end(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def sizes(self) -> list[int]:
        return [size for each in self.members()[1:] for size in each.sizes()]

    def equal(self) -> list[Tensor]:
        return self._taken

    def state(self) -> dict[str, Any]:
        state = self._outer.state()
        if self._load is not None:
            state["outer"]["lost"] = self._load.lost
            state["under_way"] = {**vars(self._load)}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: send once more what was under way."""
        self._outer.restore(state)
        if "under_way" in state:
            self._load, self._targets = Load(**state["under_way"]), self._tensors_of_moments()
            self._send(self._load)

    def _packed(self) -> Load:
        found = self._outer.pseudo_gradients(self._ahead())
        moments = [_copied(each) for each in self._tensors_of_moments()]
        weight = leave_out_(moments) if self.fit.round.is_left_out else self.fit.weight()
        number = self._sends.reserve(1 + bool(moments))
        return Load([*found], [_copied(each) for each in found.values()], moments, weight, number)

    def _send(self, load: Load) -> None:
        if self._thread is None:
            self._thread = Background(THREAD_NAME)
        self._means = [_copied(each) for each in load.pseudo_gradients], [_copied(each) for each in load.moments]
        self._sent = self._thread.submit(self._sends.later(*self._means, load.weight, load.number))

    def _ahead(self) -> dict[int, Tensor]:
        """Return what leads from where this replica begins the round back to the shared model."""
        if (load := self._load) is None:
            return {}
        ways_back = [each.to(self.fit.device) for each in load.pseudo_gradients]
        return dict(zip(load.places, ways_back, strict=True))

    def _tensors_of_moments(self) -> list[Tensor]:
        return [] if self._moments is None else self._moments.equal()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
