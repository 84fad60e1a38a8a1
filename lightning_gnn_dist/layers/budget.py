"""How much memory an evaluation may take: what the user allows, as far as the machine has it, and so how large a batch
may be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_gnn_dist.wire.memory import free_bytes, free_on, ranks_here

DEFAULT_BYTES = 4 << 30
BUDGET_BYTES = 1 << 30  # of the rows of all nodes
LEAST_BYTES = 16 << 20  # with less, a sampler's table of nodes would leave no room for a batch


class Host(NamedTuple):
    """What a host has.

    Attributes:
        free: Bytes that its processes may take beside what they hold, as the system or a control group allows.
        ranks: How many ranks run on it.
    """

    free: int
    ranks: int

    @classmethod
    def here(cls, num_ranks: int) -> Host:
        """Return what this host has, if so many ranks train."""
        return cls(free_bytes(), ranks_here(num_ranks))


def budget(wanted: int | None, device: torch.device, host: Host) -> int:
    """Return the bytes that a rank may take: ``wanted``, halved until it is at most half of a rank's share of what is
    free.

    Args:
        wanted: The bytes that the user allows. Default: 4 GiB.
        device: The device that computes.
        host: Whose memory the ranks share.
    """
    free = host.free // host.ranks
    if device.type == "cuda":
        free = min(free, free_on(device))
    return halved(DEFAULT_BYTES if wanted is None else wanted, free)


def halved(allowed: int, free: int) -> int:
    """Return the bytes that are allowed, halved until they are at most half of what is free, or the least."""
    while allowed > max(free // 2, LEAST_BYTES):
        allowed //= 2
    return max(allowed, LEAST_BYTES)
