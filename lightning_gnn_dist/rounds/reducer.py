"""What takes the means of meetings: numbers as they are, or what a user passes as ``reducer``.

A meeting brings groups of tensors, by name:

    whole             goes as it is; of integers the mean is the largest
    pseudo_gradients  from where a replica is back to the model that the round began with
    moments           of optimizers
    gradient          of a correction or an anchor

A NaN, or an infinity, is found before it spreads from one rank to all. Each rank checks what it brings and tells the
others in an exchange that is there anyway. So all know whose tensors cannot be averaged, and either all of them end, or
all of them leave these ranks out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.hosts import GradientSums

Groups = Mapping[str, Sequence[Tensor]]
Nonfinite = Literal["refuse", "leave_out"]


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


@runtime_checkable
class SendsMeans(Protocol):
    """What a user passes as the ``reducer`` of a strategy."""

    def of_rounds(self) -> Reducer:
        """Return what takes the means of meetings."""

    def of_steps(self, ddp: Any, parameters: Sequence[Tensor]) -> GradientSums:
        """Return what takes the means of gradients at every step. Collective.

        Args:
            ddp: torch's module, which would take them.
            parameters: Those whose gradients are averaged.
        """


def length_of(tensors: Iterable[Tensor]) -> int:
    """Return how many real numbers tensors have."""
    return sum(each.numel() * (2 if each.is_complex() else 1) for each in tensors)


def real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of real numbers, which lie where these do."""
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def is_rounded(moment: Tensor) -> bool:
    """Return whether a moment may go in fewer bits: real and complex numbers, but for single ones."""
    return moment.dim() > 0 and (moment.is_floating_point() or moment.is_complex())


@torch.no_grad()
def are_finite(tensors: Iterable[Tensor], read: Callable[[Tensor], float] = float) -> bool:
    """Return whether there is no NaN and no infinity in any tensor.

    Args:
        tensors: The tensors.
        read: Returns the number in a tensor, and may read others from the device with it.
    """
    all_values = (each._values() if each.is_sparse else each for each in tensors)
    floating = [values for values in all_values if values.is_floating_point() and values.numel()]
    if not floating:
        return True
    # A sum keeps NaN and infinity, and takes a thirtieth of the time of a check of each number.
    if math.isfinite(read(torch.stack([tensor.sum() for tensor in floating]).sum())):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in floating)  # large numbers may overflow a sum


def refuse_weights(bad: list[int], round_idx: int) -> NoReturn:
    """Raise, and name the ranks whose weights are not finite. All ranks do so, or none."""
    raise RuntimeError(
        f"At the meeting of round {round_idx} the weights of {_named(bad)} are NaN or infinite, which an average "
        f"would spread to all. Look at the data and the losses of {_named(bad)}, lower the learning rate, or clip "
        'gradients. nonfinite="leave_out" lets the others go on, and gives the rank their mean.'
    )


def check_alone(parameters: Iterable[Tensor]) -> None:
    """Raise if this rank's weights are not finite, before a meeting that the others hold without it. Not collective."""
    if not are_finite(parameters):
        raise RuntimeError("The weights of this rank are NaN or infinite: it ends, and the others go on without it.")


def leave_out_(tensors: Iterable[Tensor]) -> float:
    """Zero the tensors, and return the weight 0. The weight alone would not do: NaN times 0 is NaN."""
    for tensor in tensors:
        tensor.zero_()
    return 0.0


def refuse_gradients(is_finite: bool, device: torch.device, what: str) -> None:
    """Raise, and name the ranks whose value is not finite. Collective."""
    rows = collectives.gather_numbers([int(is_finite)], device)
    bad = [rank for rank, (holds,) in enumerate(rows) if not holds]
    whose = f"The {what} of {_named(bad)} is" if bad else "The gradient of some rank, but no rank's loss, is"
    raise RuntimeError(
        f"{whose} NaN or infinite, which would make the weights of all ranks so. Look at the batches there (features, "
        "edge weights, labels), lower the learning rate, or look for a division by zero or a root of zero with "
        "Trainer(detect_anomaly=True)."
    )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def is_scaled(strategy: Any) -> bool:
    """Return whether mixed precision scales the loss; it then finds overflows itself, and skips the step."""
    return getattr(strategy.precision_plugin, "scaler", None) is not None
