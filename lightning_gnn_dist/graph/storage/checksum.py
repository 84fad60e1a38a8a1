"""XXH64 (Collet; the 64-bit hash of xxHash) with seed 0, as ``xxhsum -H64`` prints it. It is as fast as memory.

lane_i = rotl(lane_i + word * P2, 31) * P1        four lanes take the words of 8 bytes in turn
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from lightning_gnn_dist.graph.storage.files import open_file

BYTES_AT_ONCE = 1 << 17  # stays in the processor's cache from being read to being hashed
STRIPE = 32  # bytes: a word for each lane
_U = np.uint64
_P1, _P2, _P3 = _U(0x9E3779B185EBCA87), _U(0xC2B2AE3D27D4EB4F), _U(0x165667B19E3779F9)
_P4, _P5 = _U(0x85EBCA77C2B2AE63), _U(0x27D4EB2F165667C5)
_START = (0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0, 0x61C8864E7A143579)


class Checksum:
    """The checksum of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._lanes = np.array(_START, np.uint64)
        self._rest = b""
        self._length = 0

    def update(self, content: npt.NDArray[np.uint8]) -> None:
        """Add bytes."""
        self._length += content.size
        if self._rest:
            missing = STRIPE - len(self._rest)
            self._rest += content[:missing].tobytes()
            content = content[missing:]
            if len(self._rest) < STRIPE:
                return
            _mix(self._lanes, np.frombuffer(self._rest, np.uint8).copy())
        whole = content.size // STRIPE * STRIPE
        _mix(self._lanes, content[:whole])
        self._rest = content[whole:].tobytes()

    def hexdigest(self) -> str:
        """The checksum of all bytes added so far, 16 hexadecimal digits."""
        rest = np.frombuffer(self._rest, np.uint8).copy()
        return f"{int(_finish(self._lanes, self._length, rest)):016x}"


def checksum_of(path: Path) -> str:
    """The checksum of a whole file."""
    checksum, buffer = Checksum(), np.empty(BYTES_AT_ONCE, np.uint8)
    with open_file(path) as stream:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            checksum.update(buffer[:count])
    return checksum.hexdigest()


@numba.njit(inline="always")
def _rotated(word: Any, bits: int) -> Any:
    return (word << _U(bits)) | (word >> _U(64 - bits))


@numba.njit(inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, 31) * _P1


@numba.njit(cache=True, nogil=True)
def _mix(lanes: Any, content: Any) -> None:
    words = content.view(np.uint64)
    a, b, c, d = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(0, words.size, 4):
        a, b = _round(a, words[i]), _round(b, words[i + 1])
        c, d = _round(c, words[i + 2]), _round(d, words[i + 3])
    lanes[0], lanes[1], lanes[2], lanes[3] = a, b, c, d


@numba.njit(cache=True)
def _finish(lanes: Any, length: int, rest: Any) -> Any:
    digest = _P5
    if length >= STRIPE:
        digest = _rotated(lanes[0], 1) + _rotated(lanes[1], 7) + _rotated(lanes[2], 12) + _rotated(lanes[3], 18)
        for i in range(4):
            digest = (digest ^ _round(_U(0), lanes[i])) * _P1 + _P4
    digest += _U(length)
    at = 0
    while at + 8 <= rest.size:
        digest = _rotated(digest ^ _round(_U(0), rest[at : at + 8].view(np.uint64)[0]), 27) * _P1 + _P4
        at += 8
    if at + 4 <= rest.size:
        digest = _rotated(digest ^ (_U(rest[at : at + 4].view(np.uint32)[0]) * _P1), 23) * _P2 + _P3
        at += 4
    while at < rest.size:
        digest = _rotated(digest ^ (_U(rest[at]) * _P5), 11) * _P1
        at += 1
    digest = (digest ^ (digest >> _U(33))) * _P2
    digest = (digest ^ (digest >> _U(29))) * _P3
    return digest ^ (digest >> _U(32))
