"""Copies from RAM to a device that the host does not wait for: they start in page-locked memory."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(array: Tensor, device: torch.device) -> Tensor:
    """The array on a device, in the order of the current stream. The array in RAM may be changed at once."""
    if device.type != "cuda" or array.is_cuda:
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)
