"""The loader that Lightning reads: one iteration, and so one epoch, is one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class RoundLoader:
    """Hands out the batches of one round per iteration, from an endless stream over ``loader``.

    It has no length on purpose: Lightning then ends the epoch when the iteration stops, and asks no other rank
    how long its loader is. An iteration starts at the batch that ``position()`` names, so a round that was cut
    short, or a run that was resumed, goes on where it stopped.

    Args:
        loader: The loader of one pass. If it has ``stream(start)``, as the data module's has, that is read; any other
            loader with a length is cycled.
        position: Returns how many batches this rank has trained on since the start of the run.
        is_over: Returns whether the round ends after that many batches of it.
    """

    def __init__(self, loader: Any, position: Callable[[], int], is_over: Callable[[int], bool]) -> None:
        self.loader = loader
        self._position = position
        self._is_over = is_over
        self._stream: Iterator[Any] | None = None
        self._at = -1

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None or self._at != self._position():
            self.close()
            self._at = self._position()
            self._stream = _stream(self.loader, self._at)
        batches = 0
        while True:
            batch = next(self._stream)
            self._at += 1
            batches += 1
            yield batch
            if self._is_over(batches):
                return

    def close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self._stream = None


def _stream(loader: Any, start: int) -> Iterator[Any]:
    if hasattr(loader, "stream"):
        return iter(loader.stream(start))
    return _cycle(loader, start)


def _cycle(loader: Any, start: int) -> Iterator[Any]:
    """Yield pass after pass of a usual loader, whose sampler shuffles by the number of the pass."""
    number, skip = divmod(start, len(loader))
    while True:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        for index, batch in enumerate(loader):
            if index >= skip:
                yield batch
        number, skip = number + 1, 0
