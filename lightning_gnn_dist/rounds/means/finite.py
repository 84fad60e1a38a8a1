"""Finds NaN and infinity at an exchange, before they spread from one rank to all.

Each rank checks what it brings and tells the others in an exchange that is there anyway. So all ranks know whose
tensors cannot be averaged, and either all of them end, or all of them leave these ranks out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives

Nonfinite = Literal["refuse", "leave_out"]
Average = Callable[[Sequence[Tensor], float], None]


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


def average_gradient_(
    gradient: list[Tensor], weight: float, choice: str, what: str, average: Average = collectives.average_
) -> None:
    """Average over ranks by weight, in place; name or leave out a rank whose own is not finite. Collective.

    Args:
        gradient: This rank's.
        weight: What it counts for.
        choice: What to do with a rank whose gradient is not finite.
        what: What gradient it is, for an error.
        average: Replaces tensors by their means over ranks, in place.
    """
    is_finite = are_finite(gradient)
    if not is_finite and choice == "leave_out" and collectives.world_size() > 1:
        weight = leave_out_(gradient)
    average(gradient, weight)
    if not are_finite(gradient):  # the same on all ranks
        refuse_gradients(is_finite, gradient[0].device, what)


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
