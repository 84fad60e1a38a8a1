"""The bytes of tensors, and a hash of them by which ranks compare what they hold. Nothing is exchanged."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS_AT_ONCE = 1 << 22  # bounds what a checksum holds beside the tensors


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """A hash of the bits of tensors, below 2**62. Nothing is exchanged."""
    total = 0
    for tensor in (each for each in tensors if each.numel()):
        plain = tensor.detach().resolve_conj()
        total = (total * 31 + (_hash_here(plain) if plain.device.type == "cpu" else _hash_there(plain))) % (1 << 62)
    return total


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, one after the other, uint8."""
    if not tensor.numel():  # numpy's empty arrays have a stride of 0, which no view survives
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _hash_here(tensor: Tensor) -> int:
    content = octets(tensor).numpy().data
    return zlib.crc32(content) << 16 ^ zlib.adler32(content)


def _hash_there(tensor: Tensor) -> int:
    total = 0
    for content in octets(tensor).split(8 * _WORDS_AT_ONCE):
        words = torch.nn.functional.pad(content, (0, -len(content) % 8)).view(torch.int64)
        place = torch.arange(1, 2 * len(words), 2, device=words.device)
        # Folded before it is multiplied, so that every bit counts, even the sign of the last number.
        mixed = (words ^ ((words >> 32) & 0xFFFFFFFF) ^ (words >> 7)) * (place * 0x9E3779B1 + 1 | 1)
        total = (total * 31 + int((mixed ^ (mixed >> 32)).sum())) % (1 << 62)
    return total
