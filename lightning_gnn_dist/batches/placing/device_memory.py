"""How much memory of a device is free."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that are free, including those that torch has reserved and does not use."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
