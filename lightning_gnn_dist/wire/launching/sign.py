"""The sign of an elastic rank: a file by which its launcher sees that it lives, and whether it waits for a quorum."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIGN = "LIGHTNING_GNN_DIST_SIGN"  # the environment variable that names the file
_WAITS = "waits"  # what the file then says
_SECONDS_BETWEEN_TOUCHES = 1.0


class Sign:
    """Touches the file every second, from :meth:`show` until :meth:`leave`; without a launcher it does nothing."""

    def __init__(self) -> None:
        self._path = Path(os.environ[SIGN]) if SIGN in os.environ else None
        self._has_left = threading.Event()

    def show(self) -> None:
        """Show that this rank lives."""
        if self._path is not None:
            threading.Thread(target=self._touch_often, args=[self._path], daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show during the block that this rank waits."""
        self._say(_WAITS)
        try:
            yield
        finally:
            self._say("")

    def leave(self) -> None:
        """Take the file away."""
        self._has_left.set()

    def _say(self, word: str) -> None:
        if self._path is not None:
            self._path.write_text(word)

    def _touch_often(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # the launcher has ended and deleted its folder
            while not self._has_left.is_set():
                path.touch()
                self._has_left.wait(_SECONDS_BETWEEN_TOUCHES)
            path.unlink()


def waits(path: Path) -> bool:
    """Whether the rank of a file waits for a quorum."""
    return path.is_file() and path.read_text() == _WAITS


def is_silent(path: Path, seconds: float) -> bool:
    """Whether a rank has shown itself, but not for some seconds."""
    with suppress(FileNotFoundError):  # the rank does not train yet
        return path.stat().st_mtime < time.time() - seconds
    return False
