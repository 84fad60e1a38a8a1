r"""Momentum that is as large as rounds agree.

With :math:`d_r` the way of round :math:`r`, from the mean of its replicas back to the model that it began with:

.. math::
    c_r = \min\Bigl(1, \max\Bigl(0, \frac{\langle d_r, d_{r-1} \rangle}{\lVert d_{r-1} \rVert^2}\Bigr)\Bigr),
    \qquad v_r = \beta\, c_r^4\, v_{r-1} + d_r,
    \qquad \theta \leftarrow \theta - \eta\, v_r

While a model is far from its end, rounds go the same way, :math:`c` is near 1, and steps grow by up to
:math:`1 / (1 - \beta)`: batches of one rank are small, and Adam's steps are the shorter the noisier gradients are.
Near the end each round is shorter than the one before or undoes it, :math:`c` falls, and momentum, which would carry
the model beyond, falls with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_STEPS = 1024  # c is a multiple of 1 / 1024: processors add in their own orders, and ranks must have the same


def share_to_keep(agreement: float) -> float:
    """Return :math:`c^4`, how much to keep of what earlier rounds say."""
    return agreement**4


class AgreeingMomentum(Optimizer):
    r"""An optimizer of meetings with such momentum.

    Args:
        parameters: What is trained.
        lr: :math:`\eta`.
        momentum: :math:`\beta`.
        nesterov: Whether a step is :math:`d_r + \beta\, c_r^4\, v_r`, as Nesterov's is.

    Attributes:
        agreement: :math:`c` of the last step; 0 before it.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, *, nesterov: bool) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov})
        self.agreement = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's may return a loss
        """Step against the gradients. A closure is not called."""
        self.agreement = self._agreement()
        for group in self.param_groups:
            weight = group["momentum"] * share_to_keep(self.agreement)
            for parameter in group["params"]:
                if (way := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                velocity = state["velocity"].mul_(weight).add_(way) if "velocity" in state else way.clone()
                parameter.sub_(way.add(velocity, alpha=weight) if group["nesterov"] else velocity, alpha=group["lr"])
                state["velocity"], state["way"] = velocity, way.clone()

    def _agreement(self) -> float:
        """How much of the round before this round does once more, between 0 and 1; 0 in the first round."""
        both = repeated = 0.0
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None and "way" in self.state[parameter]:
                before = self.state[parameter]["way"].flatten().double()
                both += float(before.dot(parameter.grad.flatten().double()))
                repeated += float(before.dot(before))
        return round(_STEPS * min(1.0, max(0.0, both / repeated))) / _STEPS if repeated > 0 else 0.0
