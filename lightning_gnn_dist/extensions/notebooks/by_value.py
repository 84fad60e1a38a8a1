"""Objects in a file for another process, also those whose classes only this process has, such as a notebook's.

Pickles name a class or function by its module. A fresh process has no such module for what a notebook, a prompt or the
script itself defines, so cloudpickle writes the code of these along. Large arrays become files beside it, and all
readers map these: what nobody writes to is in memory once, however many processes read it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20  # of an array in a file of its own
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HAVE_NUMPY_TYPE = {*_INTEGERS, torch.float16, torch.float32, torch.float64}


class CannotTravelError(TypeError):
    """An object, or something that it refers to, cannot be written."""


def write(path: Path, item: object, shared: Sequence[object] = ()) -> None:
    """Write ``item`` to a file. An object of ``shared`` in it is read as the reader's own at the same position."""
    with path.open("wb") as file:
        _dump(_Writer(file, path, shared), item)


def read(path: Path, shared: Sequence[object] = ()) -> Any:
    """Return what :func:`write` wrote. Its arrays can be written to, which changes neither files nor other readers."""
    with path.open("rb") as file:
        return _Reader(file, path, shared).load()


def as_bytes(item: object, shared: Sequence[object] = ()) -> bytes:
    """Return what :func:`write` would write, with all arrays in it."""
    buffer = io.BytesIO()
    _dump(_Writer(buffer, None, shared), item)
    return buffer.getvalue()


def from_bytes(octets: bytes, shared: Sequence[object] = ()) -> Any:
    """Return what :func:`as_bytes` was given."""
    return _Reader(io.BytesIO(octets), Path(), shared).load()


def check(item: object, shared: Sequence[object] = ()) -> None:
    """Refuse what cannot travel."""
    with open(os.devnull, "wb") as nowhere:
        _dump(_Writer(nowhere, None, shared), item)


def _dump(writer: _Writer, item: object) -> None:
    try:
        writer.dump(item)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what a class raises in __reduce__ is its own affair
        raise CannotTravelError(f"{type(item).__name__}: {error}") from error


class _Writer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, path: Path | None, shared: Sequence[object]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._path = path
        self._numbers = {id(item): number for number, item in enumerate(shared)}
        self._arrays: dict[int, tuple[Any, ...]] = {}  # holds the arrays, or another could get the id of one

    def persistent_id(self, item: Any) -> Any:
        if id(item) in self._numbers:
            return "shared", self._numbers[id(item)]
        if self._path is None or not _is_large(item):
            return None
        if id(item) not in self._arrays:
            number = len(self._arrays)
            content = item.contiguous().numpy() if isinstance(item, Tensor) else item
            np.save(_file(self._path, number), content, allow_pickle=False)
            self._arrays[id(item)] = item, number
        kind = "tensor" if isinstance(item, Tensor) else "array"
        return kind, self._arrays[id(item)][1]


class _Reader(pickle.Unpickler):
    def __init__(self, file: Any, path: Path, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._path, self._shared = path, shared
        self._arrays: dict[int, Any] = {}  # so that one object stays one

    def persistent_load(self, name: tuple[str, int]) -> Any:
        kind, number = name
        if kind == "shared":
            return self._shared[number]
        if number not in self._arrays:
            array = np.load(_file(self._path, number), mmap_mode="c", allow_pickle=False)
            self._arrays[number] = torch.from_numpy(array) if kind == "tensor" else np.asarray(array)
        return self._arrays[number]


def _is_large(item: Any) -> bool:
    """Whether an object is an array for a file of its own: numbers of the host, and no class that adds to them."""
    if type(item) is np.ndarray:
        return item.nbytes >= _LEAST_BYTES and not item.dtype.hasobject and item.dtype.names is None
    if type(item) is not Tensor or item.layout != torch.strided or item.device.type != "cpu" or item.requires_grad:
        return False
    return item.nbytes >= _LEAST_BYTES and item.dtype in _HAVE_NUMPY_TYPE


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}.npy")
