"""Parameters that need no gradient, and that ranks may change all the same.

The half of a GAN that is frozen while the other learns, a teacher, a moving target: they start equal on all ranks and
must be equal after a meeting. Most frozen parameters, those of a pretrained encoder for instance, never change and may
be large. So ranks compare checksums, and average what differs. Neither a tensor's version nor its address would tell:
who writes through ``.data`` leaves both as they are. And what is equal needs no average, whether it changed or not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from lightning_gnn_dist.wire import collectives

TRAINED = -1  # stands for a parameter that is averaged anyway


def checksums(parameters: Sequence[Tensor]) -> list[int]:
    """For each parameter a number of 48 bits that tells its content, or ``TRAINED``."""
    return [TRAINED if parameter.requires_grad else _checksum(parameter.detach()) for parameter in parameters]


def summary(numbers: Sequence[int]) -> int:
    """One number for all of them."""
    return zlib.crc32(repr(numbers).encode())


def unequal(rows: Sequence[Sequence[int]]) -> set[int]:
    """Which parameters are not the same on all ranks. A row holds one rank's checksums."""
    return {idx for idx, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1}


def _checksum(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        return collectives.checksum([tensor]) % (1 << 48)
    octets = collectives.octets(tensor).numpy().data  # the checksum of all ranks' models is ten times slower
    return zlib.crc32(octets) << 16 ^ zlib.adler32(octets)
