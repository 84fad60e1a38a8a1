"""What a user says: means in few bits, or means that travel while ranks train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_gnn_dist.extensions.rounded.codec import Bits
from lightning_gnn_dist.extensions.rounded.gradients import RoundedGradients
from lightning_gnn_dist.extensions.rounded.means import Means
from lightning_gnn_dist.rounds.reducer import Reducer
from lightning_gnn_dist.rules import check_fields
from lightning_gnn_dist.wire.hosts import GradientSums


@dataclass(frozen=True)
class Rounded:
    """Send numbers in few bits, given to a strategy as ``reducer``; what is rounded away is added the next time.

    Strategies of rounds send how far a replica has come since the meeting before, and the gradients of corrections and
    anchors, in so many bits, and moments of optimizers in 16. ``GrappaStrategy`` sends its gradients so, a million
    numbers at a time, the first while the backward pass goes on, unless DDP is to look for unused parameters. Sums are
    float32, and the same to the bit on all ranks. Buffers and counts go as they are.

    Args:
        bits: Bits of a number on the wire.
    """

    bits: Bits = 8

    def __post_init__(self) -> None:
        check_fields(self)

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""
        return Means(self.bits)

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor]) -> GradientSums:
        """Return what takes the means of gradients at every step, in the place of ``ddp``. Collective."""
        return RoundedGradients(ddp, parameters, self.bits)


@dataclass(frozen=True)
class Overlapped:
    """Let the mean of a round travel while the next one trains, given to a strategy of rounds as ``reducer``.

    It is taken in at the meeting behind that: ranks do not wait for the wire, and the mean is a round late. Validation
    and checkpoints see the model that all ranks have in common.

    Args:
        bits: Bits of a number on the wire, as of :class:`Rounded`. Default: numbers go as they are.
    """

    bits: Bits | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""
        return Means(self.bits, overlap=True)

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor]) -> GradientSums:
        """Refuse: gradients of a step are needed in it."""
        raise ValueError(
            f"reducer={self!r} lets the mean of a round travel while the next one trains, and a step needs its "
            "gradients at once: use reducer=Rounded(8), or a strategy of rounds."
        )
