"""What users say of ranks that may die and come back, and what these and their launcher tell each other."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_gnn_dist.checks import check_at_least, check_positive

# Variables of the environment:
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # the address of the lighthouse
RANK = "LIGHTNING_GNN_DIST_RANK"  # the number of this rank, for its name
RANKS = "LIGHTNING_GNN_DIST_RANKS"  # how many ranks the launcher started
SIGN = "LIGHTNING_GNN_DIST_SIGN"  # the file by which the launcher sees that the rank lives
_WAITS = "waits"  # what the file says while the rank waits for a quorum
_SECONDS_BETWEEN_TOUCHES = 1.0


@dataclass(frozen=True)
class Patience:
    """How long members wait for each other; :class:`Elastic` says what each number means."""

    patience: float = 600.0
    timeout: float = 30.0
    attempts: int = 10
    ranks: int = field(default_factory=lambda: int(os.environ.get(RANKS, "1")))
    start: float = 60.0

    def __post_init__(self) -> None:
        check_positive(patience=self.patience, timeout=self.timeout, start=self.start)
        check_at_least(1, attempts=self.attempts, ranks=self.ranks)


def check_available() -> None:
    """Refuse elastic training where torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise ValueError("Elastic() needs torchft, which is not installed: pip install lightning-gnn-dist[elastic].")


def quieten() -> None:
    """Let torchft log errors alone, unless the user says otherwise. Call it before torchft is imported.

    For the time of a line its threads read the environment without a lock: the process crashes if it sets a variable
    meanwhile.
    """
    os.environ.setdefault("RUST_LOG", "error")


def quorum_of(num_ranks: int) -> int:
    """How many ranks must be alive: a majority, so that two halves never train apart."""
    return num_ranks // 2 + 1


class Sign:
    """The file by which the launcher of an elastic rank sees that it lives, and whether it waits for a quorum.

    It is touched every second, from :meth:`show` until :meth:`leave`. Without a launcher nothing is done.
    """

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
