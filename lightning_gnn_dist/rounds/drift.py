r"""Drift correction: the global gradient as a control variate in every local step.

SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378) and SVRG (Johnson and Zhang, NeurIPS 2013) shift a
stochastic gradient by what it is off at an anchor point. Here the anchor is the averaged model of the last
meeting, and what a rank's gradient is off there is the difference between its part and the whole:

.. math::
    \tilde g(\theta) = g_p(\theta) + \bigl(\bar g(\bar\theta) - g_p(\bar\theta)\bigr),
    \qquad \bar g = \sum_p w_p\, g_p(\bar\theta) \;\text{ or }\; \nabla\mathcal{L}_\mathrm{global}(\bar\theta)

The further a replica walks from the anchor, the less the difference says. So the shift fades: at local step
:math:`k` of the round it is multiplied by :math:`d^k`. Without that, rounds of fifty steps end in ruin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class DriftCorrection:
    """Shifts the gradients of a round by the difference of two anchor gradients.

    Args:
        decay: :math:`d`, by which the shift fades with each local step. 1 keeps it.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._parameters: Sequence[Tensor] = []
        self._shift: list[Tensor] = []
        self._steps: Counter[int] = Counter()  # of each optimizer since the anchor

    @property
    def is_anchored(self) -> bool:
        """Whether a round has begun: before the first there is no shift to keep."""
        return bool(self._shift)

    @torch.no_grad()
    def anchor(self, parameters: Sequence[Tensor], shared: list[Tensor], own: list[Tensor]) -> None:
        """Start a round: ``shared`` is the gradient all ranks agree on, ``own`` this rank's."""
        self._parameters = parameters
        self._shift = [ours - mine for ours, mine in zip(shared, own, strict=True)]
        self._steps.clear()

    @torch.no_grad()
    def apply_(self, optimizer: Optimizer, scale: float = 1.0) -> None:
        """Shift the gradients that ``optimizer`` is about to use. Parameters without a gradient keep none.

        ``scale`` is by how much those gradients are still multiplied.
        """
        weight = scale * self.decay ** self._steps[id(optimizer)]
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter, shift in zip(self._parameters, self._shift, strict=True):
            if id(parameter) in stepping and parameter.grad is not None:
                refuse_sparse(parameter.grad)
                parameter.grad.add_(shift, alpha=weight)
        self._steps[id(optimizer)] += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: the running round's shift."""
        return {"shift": [shift.cpu() for shift in self._shift]}

    def restore(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Go on with the shift of a checkpoint."""
        _check_shapes(state["shift"], parameters)
        self._parameters = parameters
        pairs = zip(state["shift"], parameters, strict=True)
        self._shift = [shift.to(parameter.device) for shift, parameter in pairs]


def refuse_sparse_tables(module: nn.Module) -> None:
    """Refuse tables whose gradients name the rows of a batch only: the shift is of all rows, at every step."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{name} is an {type(child).__name__} with sparse=True, and drift correction shifts the gradients of "
                f"all of its {child.num_embeddings} rows at every step: make it with sparse=False, or train without, "
                "by drift=None."
            )


def refuse_sparse(gradient: Tensor) -> None:
    """Refuse a sparse gradient of what is no table of torch's."""
    if gradient.is_sparse:
        raise ValueError(
            f"A parameter of shape {tuple(gradient.shape)} has a sparse gradient, and drift correction shifts all of "
            "its entries at every step: look rows up with sparse=False, or train without, by drift=None."
        )


def _check_shapes(saved: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    if [tensor.shape for tensor in saved] != [tensor.shape for tensor in parameters]:
        theirs, ours = (sum(tensor.numel() for tensor in tensors) for tensors in (saved, parameters))
        raise ValueError(
            f"The checkpoint's drift correction shifts {len(saved)} parameters ({theirs} numbers), and the model "
            f"trains {len(parameters)} ({ours} numbers): resume with the parameters unfrozen that were, at the latest "
            "in on_train_start() of the module or of a callback. A BaseFinetuning unfreezes in its epoch, and not "
            "again when a run is resumed after it."
        )
