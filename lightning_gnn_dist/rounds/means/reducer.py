"""What takes the means of meetings: numbers as they are, or what a user passes as ``reducer``.

A meeting brings groups of tensors, by name:

    whole             goes as it is; of integers the mean is the largest
    pseudo_gradients  from where a replica is back to the model that the round began with
    moments           of optimizers
    gradient          of a correction or an anchor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.gradient_sums import GradientSums

Groups = Mapping[str, Sequence[Tensor]]


class Reducer:
    """Takes means over all ranks, of numbers as they are. What sends less, or later, overrides what differs."""

    takes_ways = False  # whether a meeting sends pseudo-gradients to it, in the place of weights
    is_late = False  # whether the mean of a round is taken in at the meeting behind the next

    def begin(self) -> None:
        """Open what a fit needs. Collective."""

    def begin_meeting(self, round_idx: int, lengths: Sequence[int] | None = None) -> None:
        """Note the number of the meeting, and that groups with so many numbers have as many on all ranks."""

    def mean_(self, groups: Groups, weight: float) -> None:
        """Replace all tensors, in place, by their weighted means over ranks. Collective."""
        apart = groups.get("pseudo_gradients", ())
        collectives.average_(apart, weight)
        collectives.average_(chain.from_iterable(each for each in groups.values() if each is not apart), weight)

    def stage(self, outer: Any, moments: Any) -> tuple[list[Any], list[Any]]:
        """Return the hooks that step at meetings and that average moments, to come before and behind all others."""
        return [hook for hook in (outer, moments) if hook is not None], []

    def close(self) -> None:
        """End what :meth:`begin` has opened. Not collective."""

    def forget(self) -> None:
        """Forget the fit before."""

    def lost(self) -> list[Tensor]:
        """Return what this rank has not sent of what it had, for a checkpoint."""
        return []

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what :meth:`lost` returned in the fit of a checkpoint."""

    # Among other ranks than all of them, who may die before a mean is complete.

    def rest(self, groups: Groups) -> Groups:
        """Return what does not go as it is."""
        return {}

    def mean_of_rest_(self, rest: Groups, weight: float, channel: Any, round_idx: int) -> None:
        """Replace the rest by its means over the ranks of a channel, as if none were taken since :meth:`keep`."""

    def keep(self) -> None:
        """Note that all ranks have come to the end of a meeting."""


@runtime_checkable
class SendsMeans(Protocol):
    """What a user passes as the ``reducer`` of a strategy."""

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor], *, overlaps: bool) -> GradientSums:
        """Return what takes the means of gradients at every step. Collective.

        Args:
            ddp: torch's module, which would take them.
            parameters: Those whose gradients are averaged.
            overlaps: Whether all of them get a gradient in each backward pass, so that some can be sent meanwhile.
        """


def length_of(tensors: Sequence[Tensor]) -> int:
    """Return how many real numbers tensors have."""
    return sum(each.numel() for each in real(tensors))


def real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of real numbers, which lie where these do."""
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def is_rounded(moment: Tensor) -> bool:
    """Return whether a moment may go in fewer bits: real and complex numbers, but for single ones."""
    return moment.dim() > 0 and (moment.is_floating_point() or moment.is_complex())
