r"""Drift correction: the global gradient as a control variate in every local step.

SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378) and SVRG (Johnson and Zhang, NeurIPS 2013) shift a
stochastic gradient by its error at an anchor point. Here the anchor is the averaged model of the last meeting, and the
error of a rank's gradient there is the difference between its part and the whole:

.. math::
    \tilde g(\theta) = g_p(\theta) + \bigl(\bar g(\bar\theta) - g_p(\bar\theta)\bigr),
    \qquad \bar g = \sum_p w_p\, g_p(\bar\theta) \;\text{ or }\; \nabla\mathcal{L}_\mathrm{global}(\bar\theta)

The gradient of the whole graph costs nothing where corrections end a meeting: it is the one of their last step. Then
:math:`g_p(\bar\theta)` costs nothing, either: it is that of the round's first step, which so goes along
:math:`\bar g`. A mean over ranks has to be known before that step, so there each rank measures its own.

The further a replica walks from the anchor, the less the difference says. So the shift fades: at local step
:math:`k` of the round it is multiplied by :math:`d^k`. Without that, rounds of fifty steps diverge.

Where rounds go on in one direction, what an anchor said is still true at the next, and the shift may stay. With
:math:`c` the projection of the last round's pseudo-gradient on the one before, in [0, 1]
(:mod:`~lightning_gnn_dist.rounds.means.outer`), the default is

.. math:: d = 1 - 0.2\,(1 - c^4).

Tables with sparse gradients are left out: a shift would move all of their rows at every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    loss_scale,
    mean_gradient,
    unrecorded,
    without_noise,
)
from lightning_gnn_dist.rounds.means import finite
from lightning_gnn_dist.rounds.means.means import length_of
from lightning_gnn_dist.rounds.means.outer import share_to_keep
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.rules import Count, check_fields, within

Towards = Literal["ranks", "global"]
DECAY = 0.8  # of the default, where rounds do not agree


@dataclass(frozen=True)
class Drift:
    """What local gradients are steered towards, and for how long.

    Args:
        towards: The mean gradient of the ``"ranks"``, which misses cut edges, or the ``"global"`` gradient of the whole
            graph. Default: ``"global"`` in :class:`LLCGStrategy`, else ``"ranks"``.
        decay: :math:`d` in [0, 1], the factor by which the shift fades with each local step. 1 keeps it. Default: 0.8,
            and with ``Outer(momentum=0.8, adaptive=True)`` nearer to 1 while rounds go on in one direction.
        anchor_steps: Batches, at most, of a gradient that is measured at the anchor: each rank's own with ``"ranks"``,
            and the whole graph's before the first round, and where no correction of all ranks ends a meeting. It takes
            no more than one pass.
    """

    towards: Towards | None = None
    decay: Annotated[float, within(0, 1, "with 1 the shift does not fade")] | None = None
    anchor_steps: Count = 4

    def __post_init__(self) -> None:
        check_fields(self)


def resolved(drift: Drift, modes: Sequence[Towards], strategy: str) -> Drift:
    """Return ``drift`` with ``towards`` set, by default to the first of the ``modes`` that a strategy has."""
    check_instance("drift", drift, Drift, f"a Drift, such as Drift({modes[0]!r}), or None")
    drift = replace(drift, towards=drift.towards or modes[0])
    if drift.towards not in modes:
        raise ValueError(
            f"{strategy} knows no gradient of the whole graph, so drift must not be {drift}: use "
            'Drift("ranks"), or LLCGStrategy.'
        )
    return drift


class DriftCorrection(Part):
    """Shifts the gradients of local steps by the difference of two gradients at the start of the round.

    Args:
        drift: The settings, with ``towards``.
        agreement: Returns the projection of the last pseudo-gradient on the one before, the same on all ranks.
    """

    looks_beyond_parts = True

    def __init__(self, drift: Drift, agreement: Callable[[], float] = float) -> None:
        self.drift, self._agreement = drift, agreement
        self._parameters: Sequence[Tensor] = []
        self._shift: list[Tensor] = []
        self._lacking: set[int] = set()  # places of shifts from which this rank's gradient is still to be subtracted
        self._decay = DECAY  # of this round
        self._taken: Counter[int] = Counter()  # steps of each optimizer since the anchor
        self._heard: list[Tensor] = []

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        refusals.require_anchors(fit.lightning_module.trainer, f"drift={self.drift}")
        refusals.require_step(fit.lightning_module)
        if fit.tables is not None and (trained := fit.tables.trained()) and not fit.dense_parameters():
            names = ", ".join(table.name for table in trained)
            raise ValueError(
                f"{names} is all that trains, and drift correction shifts dense gradients: use drift=None."
            )

    def begin_round(self) -> None:
        if self.drift.towards == "global":
            self.anchor_at(self.fit.dense_parameters(), self._heard or self._measured("graph"))
            self._heard = []
            return
        own = self._measured("part")
        shared, average = [gradient.clone() for gradient in own], self.fit.means.average_gradient_
        finite.average_gradient_(shared, self.fit.weight(), self.fit.nonfinite, "anchor gradient", average)
        self.anchor_at(self.fit.dense_parameters(), shared, own)

    def hear(self, gradient: Sequence[Tensor]) -> None:
        """Take the gradient of trained parameters on the whole graph, the same on all ranks, for the next round."""
        dense = [each.clone() for each in gradient if not each.is_sparse]
        if loss_scale(self.fit) == 1.0 or any(bool(each.any()) for each in dense):  # else it has overflowed everywhere
            self._heard = dense

    def _measured(self, of: Scope) -> list[Tensor]:
        """Return the gradient of the rank's part, or the one of the whole graph, which is collective."""
        module, here = self.fit.lightning_module, self.fit.round
        data = refusals.require_anchors(module.trainer, f"drift={self.drift}")
        batches = data.anchor_batches(here.round_idx, of=of, start=here.batches_done if of == "part" else None)
        with unrecorded(module), without_noise(module):  # dropout would add nothing but variance
            batches, parameters = islice(batches, self.drift.anchor_steps), self.fit.dense_parameters()
            gradient, seeds = mean_gradient(self.fit, batches, parameters)
            if of == "graph":
                average_gradient_(self.fit, gradient, seeds)
        return gradient

    @torch.no_grad()
    def anchor_at(
        self, parameters: Sequence[Tensor], shared: Sequence[Tensor], own: Sequence[Tensor] | None = None
    ) -> None:
        """Start a round with known gradients: ``shared`` is the one that all ranks agree on, ``own`` this rank's.

        None: that of its first step.
        """
        self._parameters = parameters
        self._shift = [*shared] if own is None else [ours - mine for ours, mine in zip(shared, own, strict=True)]
        self._lacking = set(range(len(shared))) if own is None else set()
        self._decay = decay_after(self._agreement()) if self.drift.decay is None else self.drift.decay
        self._taken.clear()

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Shift, in place, the gradients that ``optimizer`` is about to use; where there is none, none is made."""
        # A fused optimizer unscales gradients itself, later.
        scale = loss_scale(self.fit) if getattr(optimizer, "_step_supports_amp_scaling", False) else 1.0
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            place: parameter.grad
            for place, parameter in enumerate(self._parameters)
            if id(parameter) in stepping and parameter.grad is not None
        }
        self._subtract_own(gradients, scale)
        for place in gradients.keys() - self._lacking:
            gradients[place].add_(self._shift[place], alpha=scale * self._decay ** self._taken[id(optimizer)])
        self._taken[id(optimizer)] += 1

    def _subtract_own(self, gradients: Mapping[int, Tensor], scale: float) -> None:
        """Complete shifts by this rank's first gradients of the round, unless half precision has overflowed."""
        first = {place: gradient for place, gradient in gradients.items() if place in self._lacking}
        if finite.are_finite(first.values()):
            for place, gradient in first.items():
                self._shift[place] = self._shift[place].sub(gradient, alpha=1.0 / scale)
            self._lacking -= first.keys()

    def sizes(self) -> list[int]:
        return [length_of(self.fit.trained_parameters())]

    def state(self) -> dict[str, Any]:
        """Return the shift of the round that begins, for a checkpoint; it is empty before the first round."""
        if not self._shift:
            return {}
        return {"drift": {"shift": [shift.cpu() for shift in self._shift], "decay": self._decay}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the shift of a checkpoint, or take an anchor if the run that wrote it had none."""
        if "drift" not in state:
            self.begin_round()
            return
        shifts, self._parameters = state["drift"]["shift"], self.fit.dense_parameters()
        _check_shapes(shifts, self._parameters)
        self._shift = [shift.to(each.device) for shift, each in zip(shifts, self._parameters, strict=True)]
        self._lacking = set(range(len(shifts))) if self.drift.towards == "global" else set()
        self._decay = state["drift"].get("decay", DECAY) if self.drift.decay is None else self.drift.decay
        self._taken.clear()


def decay_after(agreement: float) -> float:
    """Return the default decay of a round after rounds that agreed so much."""
    return 1.0 - (1.0 - DECAY) * (1.0 - share_to_keep(agreement))


def _check_shapes(saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in parameters]:
        theirs, ours = (sum(tensor.numel() for tensor in tensors) for tensors in (saved, parameters))
        raise ValueError(
            f"The checkpoint's drift correction shifts {len(saved)} parameters ({theirs} numbers), and the model "
            f"trains {len(parameters)} ({ours} numbers): resume with the parameters unfrozen that were, at the latest "
            "in on_train_start() of the module or of a callback. A BaseFinetuning unfreezes in its epoch, and not "
            "again when a run is resumed after it."
        )
