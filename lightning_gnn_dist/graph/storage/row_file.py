"""A ``.npy`` file with a row for every node, to which several processes write at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RowFile:
    """Writes rows to a file that :func:`make` has made, by ``pwrite``: a map would count as memory in use.

    Args:
        path: The file.
        says: What returned the rows, for error messages.
    """

    def __init__(self, path: Path, says: str = "predict_step") -> None:
        self.path, self.written, self._says = path, 0, says
        array = np.load(path, mmap_mode="r")
        self._shape, self._dtype, self._offset = array.shape, array.dtype, array.offset
        self._file = path.open("r+b")

    def __len__(self) -> int:
        return int(self._shape[0])

    def write(self, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Write ``rows[i]`` as the row of node ``ids[i]``."""
        if rows.shape != (len(ids), *self._shape[1:]) or rows.dtype != self._dtype:
            raise ValueError(
                f"{self._says} returned {rows.dtype} {rows.shape} for {len(ids)} seeds, after rows of {self._dtype} "
                f"{self._shape[1:]}: it must return one row of one kind for each seed."
            )
        for first, last in _runs(ids):
            offset = self._offset + int(ids[first]) * rows[:1].nbytes
            content = np.ascontiguousarray(rows[first:last]).reshape(-1).view(np.uint8).data
            while content:  # a write may be shorter than asked for
                done = os.pwrite(self._file.fileno(), content, offset)
                content, offset = content[done:], offset + done
        self.written += len(ids)

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close the file, of which nobody needs the rows any more."""
        self._file.close()


def make(path: Path, num_rows: int, like: NDArray[Any]) -> None:
    """Make a file of ``num_rows`` zero rows, each of the type and shape of a row of ``like``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.lib.format.open_memmap(path, mode="w+", dtype=like.dtype, shape=(num_rows, *like.shape[1:]))


def has_rows(outputs: Any, count: int) -> bool:
    """Whether a model has returned a tensor with ``count`` rows or more."""
    return isinstance(outputs, Tensor) and outputs.dim() > 0 and len(outputs) >= count


def rows_of(outputs: Any, batch_size: int, says: str = "predict_step") -> NDArray[Any]:
    """The rows of the seeds, the first ``batch_size`` of ``outputs``, as an array that can be written."""
    if not has_rows(outputs, batch_size):
        got = f"a tensor of {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise TypeError(
            f"What {says} returns is written, a tensor with a row for each of the {batch_size} seeds, and it returned "
            f"{got}: return logits or embeddings."
        )
    rows = outputs[:batch_size].detach().cpu()
    array: NDArray[Any] = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()  # numpy has no bfloat16
    return array


def _runs(ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield first and end position of each run of consecutive ids. The ids of one rank are usually one run."""
    ends = [*(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    if len(ids):
        yield from zip([0, *ends[:-1]], ends, strict=True)
