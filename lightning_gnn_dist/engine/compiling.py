"""How the loops of sampling are compiled."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import event

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def digest_of(folder: Path) -> str:
    """A hash of all sources in a folder, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCES = digest_of(Path(__file__).parent)


class Notice(event.Listener):
    """Say that kernels are compiled, once in a process, and on one rank of a host: nothing else is seen meanwhile."""

    def __init__(self) -> None:
        self.is_given = False

    def on_start(self, event: event.Event) -> None:
        of_package = event.data["dispatcher"].py_func.__module__.startswith("lightning_gnn_dist.")
        if of_package and not self.is_given and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning(
                "Compiling the loops that make batches, once after an installation: the first batch takes 10 to 60 s."
            )
            self.is_given = True

    def on_end(self, event: event.Event) -> None:
        """How long it took is not said: the first batch is there."""


event.register("numba:compile", Notice())  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """Compile a kernel: it runs without the interpreter's lock, and is kept on disk until a source here changes.

    numba itself watches the kernel's own file alone, but a kernel contains its parts, also those of other files.
    """
    function.__qualname__ += f"_{_SOURCES}"  # numba keeps it on disk under this name
    return cast(Function, njit(cache=True, nogil=True)(function))


def part(function: Function) -> Function:
    """Compile a part of a kernel, which Python never calls itself."""
    return cast(Function, njit(nogil=True)(function))


def inlined(function: Function) -> Function:
    """Compile a small function into each kernel that calls it."""
    return cast(Function, njit(inline="always")(function))
