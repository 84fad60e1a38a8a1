"""Exchanges that go on while a rank computes, and for which a rank that has failed does not wait."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
SECONDS_TO_END = 5.0  # that an exchange has at the end; other ranks that are well take part in it at once


class Background:
    """A thread that runs what it is given, in order. A process that ends does not wait for it.

    An executor of Python's would: a rank that raises while another stands still would say so only when the exchange
    between them gives up, half an hour later.

    Args:
        name: What the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run some work after all that was given before."""
        future = Future[Result]()
        self._given.put((future, work))
        return future

    def close(self) -> None:
        """Run what was given, and end; wait some seconds for that at most."""
        self._given.put(None)
        self._thread.join(SECONDS_TO_END)

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            future, work = given
            try:
                future.set_result(work())
            except BaseException as error:  # raised where the result is waited for
                future.set_exception(error)
