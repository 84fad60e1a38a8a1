r"""Drift correction: the global gradient as a control variate in every local step.

SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378) and SVRG (Johnson and Zhang, NeurIPS 2013) shift a
stochastic gradient by its error at an anchor point. Here the anchor is the averaged model of the last meeting, and the
error of a rank's gradient there is the difference between its part and the whole:

.. math::
    \tilde g(\theta) = g_p(\theta) + \bigl(\bar g(\bar\theta) - g_p(\bar\theta)\bigr),
    \qquad \bar g = \sum_p w_p\, g_p(\bar\theta) \;\text{ or }\; \nabla\mathcal{L}_\mathrm{global}(\bar\theta)

The further a replica walks from the anchor, the less the difference says. So the shift fades: at local step
:math:`k` of the round it is multiplied by :math:`d^k`. Without that, rounds of fifty steps diverge.

What an anchor said may still be true at the next one, and then the shift may stay. With :math:`e` the relative change
of a rank's shift, :math:`s'` at the anchor before and :math:`s` now, the default towards the whole graph is

.. math:: d = 1 - 0.2\,\bigl(1 - \exp(-100\,e^2)\bigr), \qquad
    e^2 = \frac{\lVert s - s' \rVert^2}{\lVert s \rVert^2 + \lVert s' \rVert^2}.

So :math:`d` is 1 for a shift that is what it was, and .87 for one that has changed by a tenth. Parts with unlike labels
have shifts that grow by a third from round to round: if those stay, they throw the models to and fro. Towards the mean
of the ranks :math:`d` is 0.8: their shifts add up to nothing, and would not if each faded in its own way.

Tables with sparse gradients are left out: a shift would move all of their rows at every step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import Count, check_fields, check_instance, within
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    loss_scale,
    mean_gradient,
    unrecorded,
    without_noise,
)
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.refusals import require_batches

Towards = Literal["ranks", "global"]
DECAY = 0.8  # by default, where the shift changes


@dataclass(frozen=True)
class Drift:
    """What local gradients are steered towards, and for how long.

    Args:
        towards: The mean gradient of the ``"ranks"``, which misses cut edges, or the ``"global"`` gradient of the whole
            graph. Default: ``"global"`` in :class:`LLCGStrategy`, else ``"ranks"``.
        decay: :math:`d` in [0, 1], the factor by which the shift fades with each local step. 1 keeps it. Default: 0.8,
            and towards the ``"global"`` gradient nearer to 1 where a rank's shift is what it was a round ago.
        anchor_steps: Batches of an anchor gradient, at most; it takes no more than one pass.
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


class DriftCorrection(MeetingHook):
    """Takes two gradients at the start of every round, and shifts those of its local steps by their difference.

    Args:
        drift: The settings, with ``towards``.
    """

    looks_beyond_parts = averages_gradients = True

    def __init__(self, drift: Drift) -> None:
        self.drift = drift
        self.batches_of_graph = drift.anchor_steps if drift.towards == "global" else 0  # that an anchor may take
        self._is_measured = drift.decay is None and drift.towards == "global"  # the decay, anew in each round
        self._forget()

    def _forget(self) -> None:
        """Be as before the first round: a search of the learning rate has had rounds, and the fit begins behind it."""
        self._parameters: Sequence[Tensor] = []
        self._shift: list[Tensor] = []
        self._decay = DECAY if self.drift.decay is None else self.drift.decay  # of this round
        self._taken: Counter[int] = Counter()  # steps of each optimizer since the anchor

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data = require_batches(fit.lightning_module.trainer, "anchor_batches", f"drift={self.drift}")
        if (rows := fit.names_of_rows()) and not fit.dense_parameters():
            raise ValueError(
                f"{', '.join(rows)} is all that trains, and drift correction shifts dense gradients: use drift=None."
            )

    def begin_round(self) -> None:
        module, here = self.fit.lightning_module, self.fit.round
        batches = self._data.anchor_batches(here.round_idx, start=here.batches_done)
        with unrecorded(module), without_noise(module):  # dropout would add nothing but variance
            parameters = self.fit.dense_parameters()
            own, _ = mean_gradient(self.fit, islice(batches, self.drift.anchor_steps), parameters)
            if self.drift.towards == "global":  # the round's first batches; its corrections take those that follow
                batches = islice(self._data.anchor_batches(here.round_idx, of="graph"), self.drift.anchor_steps)
                shared, seeds = mean_gradient(self.fit, batches, parameters)
                average_gradient_(self.fit, shared, seeds)
            else:
                shared = [gradient.clone() for gradient in own]
                average_gradient_(self.fit, shared, self.fit.weight(), "anchor gradient")
        self.anchor_at(parameters, shared, own)

    @torch.no_grad()
    def anchor_at(self, parameters: Sequence[Tensor], shared: list[Tensor], own: list[Tensor]) -> None:
        """Start a round with known gradients: ``shared`` is the one that all ranks agree on, ``own`` this rank's."""
        before = dict(zip(map(id, self._parameters), self._shift, strict=True))
        self._parameters = parameters
        self._shift = [ours - mine for ours, mine in zip(shared, own, strict=True)]
        if self._is_measured:
            self._decay = decay_of([before.get(id(each)) for each in parameters], self._shift)
        self._taken.clear()

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Shift, in place, the gradients that ``optimizer`` is about to use; where there is none, none is made."""
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)  # fused: it does so itself, later
        weight = (loss_scale(self.fit) if unscales else 1.0) * self._decay ** self._taken[id(optimizer)]
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter, shift in zip(self._parameters, self._shift, strict=True):
            if id(parameter) in stepping and parameter.grad is not None:
                parameter.grad.add_(shift, alpha=weight)
        self._taken[id(optimizer)] += 1

    def state(self) -> dict[str, Any]:
        """Return the running round's shift for a checkpoint; it is empty before the first round."""
        if not self._shift:
            return {}
        return {"drift": {"shift": [shift.cpu() for shift in self._shift], "decay": self._decay}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the shift of a checkpoint, or take an anchor if the run that wrote it had none."""
        self._forget()
        if "drift" not in state:
            self.begin_round()
            return
        shifts, self._parameters = state["drift"]["shift"], self.fit.dense_parameters()
        _check_shapes(shifts, self._parameters)
        self._shift = [shift.to(each.device) for shift, each in zip(shifts, self._parameters, strict=True)]
        if self._is_measured:
            self._decay = state["drift"].get("decay", DECAY)


def decay_of(before: Sequence[Tensor | None], now: Sequence[Tensor]) -> float:
    """Return the default :math:`d` of a round; :math:`e^2` is 1 for a shift that is new, or was not finite."""
    apart = sizes = 0.0
    for old, new in zip(before, now, strict=True):
        new = new.double()
        old = torch.zeros_like(new) if old is None else old.double()
        apart += float((new - old).square().sum())
        sizes += float(new.square().sum() + old.square().sum())
    changed = apart / sizes if sizes else 1.0
    return 1.0 - (1.0 - DECAY) * (1.0 - math.exp(-100.0 * (changed if math.isfinite(changed) else 1.0)))


def _check_shapes(saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in parameters]:
        theirs, ours = (sum(tensor.numel() for tensor in tensors) for tensors in (saved, parameters))
        raise ValueError(
            f"The checkpoint's drift correction shifts {len(saved)} parameters ({theirs} numbers), and the model "
            f"trains {len(parameters)} ({ours} numbers): resume with the parameters unfrozen that were, at the latest "
            "in on_train_start() of the module or of a callback. A BaseFinetuning unfreezes in its epoch, and not "
            "again when a run is resumed after it."
        )
