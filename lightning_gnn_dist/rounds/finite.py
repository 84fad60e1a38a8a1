"""NaN and infinity, found where ranks exchange, before one rank's have spread to all of them.

What a rank brings is summed in one pass of its own, and its word travels in an exchange that there is anyway. So all
ranks know who brings what cannot be averaged, and either all of them end, or all of them do without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives

Nonfinite = Literal["refuse", "leave_out"]


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether there is no NaN and no infinity."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return True
    # Neither gets lost in a sum, which takes a thirtieth of the time that a look at each number does.
    if bool(torch.stack([tensor.sum() for tensor in floating]).sum().isfinite()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in floating)  # large numbers may overflow a sum


def tell(batches: int, parameters: Iterable[Tensor]) -> int:
    """The number of batches, negative if the replica is not finite: so its word costs the meeting nothing."""
    return batches if are_finite(parameters) else -batches


def hear(counts: list[int], choice: str, round_idx: int) -> tuple[list[int], list[int]]:
    """The numbers of batches, and who is left out. All ranks see the same numbers, so all of them raise or none."""
    bad = [rank for rank, count in enumerate(counts) if count < 0]
    if bad and (choice == "refuse" or len(bad) == len(counts)):
        raise RuntimeError(
            f"At the meeting of round {round_idx} the weights of {_named(bad)} are NaN or infinite, which an average "
            f"would spread to all. Look at the data and the losses of {_named(bad)}, lower the learning rate, or clip "
            'gradients. nonfinite="leave_out" lets the others go on, and gives the rank their mean.'
        )
    return [abs(count) for count in counts], bad


def check_alone(parameters: Iterable[Tensor]) -> None:
    """Before a meeting that goes on without a rank that ends. Not collective."""
    if not are_finite(parameters):
        raise RuntimeError("The weights of this rank are NaN or infinite: it ends, and the others go on without it.")


def leave_out_(tensors: Iterable[Tensor]) -> float:
    """Make what a rank brings count for nothing. Returns its weight: 0, which NaN times 0 alone would not do."""
    for tensor in tensors:
        tensor.zero_()
    return 0.0


def average_gradient_(gradient: list[Tensor], weight: float, choice: str, what: str) -> None:
    """The weighted mean of all ranks, in place; a rank whose own is not finite is named, or left out. Collective."""
    is_finite = are_finite(gradient)
    if not is_finite and choice == "leave_out" and collectives.world_size() > 1:
        weight = leave_out_(gradient)
    collectives.average_(gradient, weight)
    if not are_finite(gradient):  # the same on all ranks
        refuse_gradients(is_finite, gradient[0].device, what)


def refuse_gradients(is_finite: bool | Tensor, device: torch.device, what: str) -> None:
    """Name the ranks that brought what is not finite. Collective."""
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
    """Whether mixed precision scales the loss: it finds overflows itself, skips the step, and goes on."""
    return getattr(strategy.precision_plugin, "scaler", None) is not None
