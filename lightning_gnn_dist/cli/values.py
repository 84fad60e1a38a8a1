"""Types of the options on the command line."""

from __future__ import annotations

import argparse
import math
from typing import TypeAlias

LEAST_MEMORY = 1_000_000  # with less, files are read a few thousand edges at a time, or nothing can be sorted

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


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
    return _more_than_none("seconds", text)


def gigabits(text: str) -> float:
    """A positive number of gigabits in a second."""
    return _more_than_none("Gbit/s", text)


def _more_than_none(unit: str, text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of {unit}, more than 0, got {text:.40}")
    return value


def gigabytes(text: str) -> int:
    """A number of gigabytes, returned in bytes."""
    value = float(text) * 1e9
    if not 1 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be more than 0 and finite, got {text:.40}")
    return round(value)


def memory(text: str) -> int:
    """Gigabytes of memory to work with, returned in bytes."""
    value = gigabytes(text)
    if value < LEAST_MEMORY:
        raise argparse.ArgumentTypeError(
            f"must be at least {LEAST_MEMORY / 1e9:g} ({in_bytes(LEAST_MEMORY)}), got {text}"
        )
    return value


def in_bytes(count: float) -> str:
    """A number of bytes in a fitting unit, such as ``1.5 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
