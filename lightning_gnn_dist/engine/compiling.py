"""How the loops of sampling are compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def digest_of(folder: Path) -> str:
    """A short name for all that the sources in a folder say."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCES = digest_of(Path(__file__).parent)


def compiled(function: Function) -> Function:
    """A kernel: without the interpreter's lock, and kept on disk until a source in this folder changes.

    numba itself looks at the kernel's own file alone, and a kernel holds its parts, also those of other files.
    """
    function.__qualname__ += f"_{_SOURCES}"  # which it is kept under
    return cast(Function, njit(cache=True, nogil=True)(function))


def part(function: Function) -> Function:
    """A part of a kernel, which Python never calls itself."""
    return cast(Function, njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """A small function inside a kernel: compiled into its caller, never on its own."""
    return cast(Function, njit(inline="always")(function))
