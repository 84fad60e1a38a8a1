"""Types of the options on the command line."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_MEMORY = 1_000_000  # with less, files are read a few thousand edges at a time, or nothing can be sorted

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def check_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is, unless that may be replaced."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already: choose another path, or add --overwrite.")


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _at_least(1, text)


def count(text: str) -> int:
    """An integer of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, more than 0, got {text:.40}")
    return value


def memory(text: str) -> int:
    """Gigabytes of memory to work with, returned in bytes."""
    value = float(text) * 1e9
    if not LEAST_MEMORY <= value < 2**63:
        least = f"{LEAST_MEMORY / 1e9:g} ({LEAST_MEMORY / 1e6:.1f} MB)"
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {text:.40}")
    return round(value)


def nodes_named(text: str) -> list[int]:
    """Ids of nodes: numbers with commas between them, or a file that has them, ``.npy`` or one in each line."""
    words = words_in(text)
    if len(words) == 0:
        raise ValueError(f"{text} names no node: write an id in each line.")
    if not isinstance(words, list):
        if words.ndim != 1 or words.dtype.kind not in "iu":
            raise ValueError(f"{text} must hold a vector of integers, got {words.dtype} of shape {words.shape}.")
        return [int(number) for number in words]
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ValueError(
            "nodes must be ids with commas between them, or a file of ids that is there, got "
            f"{wrong[0]!r:.40} in {text}."
        )
    return [int(word) for word in words]


def words_in(text: str) -> list[str] | NDArray[Any]:
    """What stands between commas, or in the lines of a file of this name; of a ``.npy`` its array."""
    path = Path(text)
    if path.suffix == ".npy":
        import numpy as np  # for help, none is needed

        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        return found
    if not _is_file(path):
        return [word.strip() for word in text.split(",")]
    return [word.strip() for word in path.read_text().splitlines() if word.strip()]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a list of ids that is too long for a name
        return False
