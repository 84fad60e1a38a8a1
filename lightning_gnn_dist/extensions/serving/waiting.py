"""Requests wait for one thread, which answers at once all that came while it answered those before.

request -> waits, or is refused where too many do -> answered with others -> its row, or too late
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_gnn_dist.extensions.serving.question import Question

Answer = Callable[[Sequence[Question]], Sequence[bytes]]  # of each request, as it is sent


class FullError(Exception):
    """So many requests wait that no more is taken."""


class LateError(Exception):
    """A request was not answered in time."""


@dataclass(frozen=True, eq=False)
class _Entry:
    question: Question
    answer: asyncio.Future[bytes]


class Waiting:
    """Requests that wait for their answers, in the order in which they came.

    Args:
        answer: Answers requests, in a thread.
        most_waiting: How many may wait.
        seconds: How long a request may take.
        most_nodes: Requests are answered together as long as they ask for no more nodes; a larger one is alone.

    Attributes:
        answered: How many requests were answered together, for each time.
    """

    def __init__(self, answer: Answer, most_waiting: int, seconds: float, most_nodes: int) -> None:
        self._answer, self._most_waiting, self._seconds, self._most_nodes = answer, most_waiting, seconds, most_nodes
        self._line, self._came = deque[_Entry](), asyncio.Event()
        self.answered: Callable[[int], None] = lambda count: None

    def __len__(self) -> int:
        return len(self._line)

    async def ask(self, question: Question) -> bytes:
        """Return the answer to a request."""
        if len(self._line) >= self._most_waiting:
            raise FullError
        entry = _Entry(question, asyncio.get_running_loop().create_future())
        self._line.append(entry)
        self._came.set()
        try:
            async with asyncio.timeout(self._seconds):
                return await entry.answer
        except TimeoutError as error:
            raise LateError from error
        finally:
            if entry in self._line:
                self._line.remove(entry)

    async def run(self) -> None:
        """Answer requests until this is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "answers") as thread:
            while True:
                await self._came.wait()
                taken = self._taken()
                if not self._line:
                    self._came.clear()
                if not taken:
                    continue
                self.answered(len(taken))
                found = await loop.run_in_executor(thread, self._answers, [entry.question for entry in taken])
                for entry, answer in zip(taken, found, strict=True):
                    _tell(entry.answer, answer)

    def _taken(self) -> list[_Entry]:
        """Take the first requests, as many as are answered together."""
        taken, nodes = list[_Entry](), 0
        while self._line and (not taken or nodes + len(self._line[0].question.nodes) <= self._most_nodes):
            taken.append(self._line.popleft())
            nodes += len(taken[-1].question.nodes)
        return taken

    def _answers(self, questions: list[Question]) -> list[bytes | Exception]:
        """Answer requests together, or where that fails each alone, so that none spoils another's answer."""
        try:
            return list(self._answer(questions))
        except Exception as error:
            if len(questions) == 1:
                return [error]
        return [answer for question in questions for answer in self._answers([question])]


def _tell(future: asyncio.Future[bytes], answer: bytes | Exception) -> None:
    if future.done():  # nobody waits any more
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
