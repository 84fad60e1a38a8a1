"""The newest of the files that hosts keep for themselves comes to all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_gnn_dist.wire.collectives import broadcast_, gather_numbers, rank

PIECE_BYTES = 64 << 20
_NONE = -1


def bring_newest(number: int | None, path_of: Callable[[int], Path], *, writes: bool) -> int | None:
    """Return the largest number that a rank has a file of, once that file lies on all hosts; None if there is none.

    Collective.

    Args:
        number: Of the newest file here. All ranks of a host must give the same.
        path_of: Where the file of a number lies.
        writes: Whether this rank is the one of its host that writes.
    """
    own = _NONE if number is None else number
    num_bytes = 0 if number is None else path_of(number).stat().st_size
    of_ranks = gather_numbers([own, num_bytes], torch.device("cpu"))
    newest, num_bytes = max(of_ranks)
    if newest == _NONE:
        return None
    if any(number != newest for number, _ in of_ranks):
        source = of_ranks.index([newest, num_bytes])
        _send(path_of(newest), num_bytes, source, writes=writes and own != newest)
        gather_numbers([newest], torch.device("cpu"))  # no rank reads what its host still writes
    return newest


def _send(path: Path, num_bytes: int, source: int, *, writes: bool) -> None:
    """Write the file of one rank where it is lacking. Collective."""
    being_written = path.with_name(f"{path.name}.received")
    with (
        open(path if rank() == source else os.devnull, "rb") as held,
        open(being_written if writes else os.devnull, "wb") as file,
    ):
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = torch.zeros(min(PIECE_BYTES, num_bytes - start), dtype=torch.uint8)
            if rank() == source:
                held.readinto(piece.numpy().data)
            broadcast_([piece], source)
            if writes:
                file.write(piece.numpy().data)
    if writes:
        being_written.replace(path)
