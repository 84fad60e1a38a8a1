"""The optimizer of correction steps: a second one, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist import collectives

Mode = Literal["persistent", "reset", "averaged", "sgd"]
Make = Callable[[list[Tensor]], Optimizer]


class CorrectionOptimizer:
    """Steps along global gradients, with a state that never mixes with that of the local steps.

    Args:
        mode: Where its state comes from; see :class:`~lightning_gnn_dist.strategies.llcg.LLCGStrategy`. Or a
            function from parameters to an optimizer, whose state persists.
        lr: Its learning rate. Default: that of the local steps.
    """

    def __init__(self, mode: Mode | Make, lr: float | None) -> None:
        if not callable(mode) and mode not in get_args(Mode):
            raise ValueError(
                f"correction_optimizer must be one of {list(get_args(Mode))}, or a function from parameters to an "
                f"optimizer such as `lambda parameters: torch.optim.Adam(parameters, lr=0.001)`, got {mode!r}."
            )
        if lr is not None and not lr > 0:
            raise ValueError(f"correction_lr must be positive, got {lr!r}. For no correction use correction_steps=0.")
        if callable(mode) and lr is not None:
            raise ValueError("correction_lr is ignored by an optimizer of your own: set its lr where you make it.")
        self.mode = mode
        self.lr = lr
        self._optimizers: list[Optimizer] = []
        self._made_in_round = -1

    def step(
        self, local: Sequence[Optimizer], parameters: list[Tensor], gradient: list[Tensor], round_idx: int
    ) -> None:
        """One step of ``parameters`` along ``gradient``. Leaves no gradients behind."""
        if not self._optimizers or (self.mode in ("reset", "averaged") and self._made_in_round != round_idx):
            self._optimizers = self._make(local, parameters)
            self._made_in_round = round_idx
            if self.mode == "averaged":
                _start_from_mean(self._optimizers, local)
        self._follow_lr(local)
        for parameter, direction in zip(parameters, gradient, strict=True):
            parameter.grad = direction
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def restore(self, state: list[dict[str, Any]], local: Sequence[Optimizer], parameters: list[Tensor]) -> None:
        if state:
            self._optimizers = self._make(local, parameters)
        for optimizer, saved in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(saved)

    def _make(self, local: Sequence[Optimizer], parameters: list[Tensor]) -> list[Optimizer]:
        if callable(self.mode):
            return [self.mode(parameters)]
        if self.mode == "sgd":
            return [torch.optim.SGD(parameters, lr=self.lr or local[0].param_groups[0]["lr"])]
        made = []
        for optimizer in local:
            groups = [dict(group) for group in optimizer.param_groups]
            made.append(type(optimizer)(groups, **optimizer.defaults))
        return made

    def _follow_lr(self, local: Sequence[Optimizer]) -> None:
        if callable(self.mode):
            return
        leaders = local if self.mode != "sgd" else local[:1]
        for own, leader in zip(self._optimizers, leaders, strict=True):
            for group, other in zip(own.param_groups, leader.param_groups, strict=False):
                group["lr"] = other["lr"] if self.lr is None else self.lr


def _start_from_mean(optimizers: Sequence[Optimizer], local: Sequence[Optimizer]) -> None:
    """Collective: give ``optimizers`` the mean of the ranks' local states, which stay as they are."""
    copies = []
    for own, other in zip(optimizers, local, strict=True):
        own.load_state_dict(other.state_dict())  # copies what it reads
        for state in own.state.values():
            copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
            state.update(copied)
            copies += [value for name, value in sorted(copied.items()) if isinstance(value, Tensor)]
    collectives.average_(copies)
