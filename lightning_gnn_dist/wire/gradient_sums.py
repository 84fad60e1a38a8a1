"""What makes the means of gradients at every step: torch's DDP by itself, or what takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class GradientSums:
    """Leaves them to DDP. What sends gradients otherwise overrides what it does otherwise."""

    is_of_ddp = True  # whether DDP sends them, in buckets that it makes

    def begin(self, step: int) -> None:
        """Get ready for a backward pass whose gradients are averaged."""

    def finish(self) -> None:
        """Replace the gradients by their means over ranks, after the backward pass. Collective."""

    def close(self) -> None:
        """End what is under way. Not collective."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank."""
        return {}

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with the ``lost`` that :meth:`state` had in the fit of a checkpoint."""
