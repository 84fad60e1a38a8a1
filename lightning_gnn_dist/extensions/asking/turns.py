"""Work that stops wherever it must be told something, so that what several pieces of it ask goes in one exchange.

    work -> its questions -> | one exchange | -> the answers -> work goes on
    more work -> its questions -> |         |

A turn is such an exchange: all others are waited for once, whatever is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

Result = TypeVar("Result")
Ask = Callable[[list[Any]], Sequence[Any]]  # takes questions, and returns as many answers
Steps: TypeAlias = Generator[list[Any], list[Any], Result]  # yields questions, and is sent their answers


class Inquiry(Generic[Result]):
    """Work that has been begun, and goes on when it is told what it asks.

    Args:
        steps: The work.

    Attributes:
        asks: What it asks now.
        is_done: Whether it is done.
    """

    def __init__(self, steps: Steps[Result]) -> None:
        self._steps, self.asks, self.is_done = steps, list[Any](), False
        self._result: Result | None = None
        self.tell(None)

    @property
    def result(self) -> Result:
        """What came of it."""
        assert self.is_done
        return self._result  # type: ignore[return-value]

    def tell(self, answers: Any) -> None:
        """Answer what it asks, and let it go on; None begins it."""
        try:
            self.asks = self._steps.send(answers)
        except StopIteration as end:
            self.asks, self.is_done, self._result = [], True, end.value

    def close(self) -> None:
        """Give it up."""
        self._steps.close()


def take_turn(works: Sequence[Inquiry[Any]], ask: Ask) -> None:
    """Answer what all works ask, in one exchange. If that fails, all of them are given up."""
    try:
        _tell(works, ask([question for work in works for question in work.asks]))
    except BaseException:
        for work in works:
            work.close()
        raise


def answered(steps: Steps[Result], ask: Ask) -> Result:
    """Do some work at once."""
    work = Inquiry(steps)
    while not work.is_done:
        take_turn([work], ask)
    return work.result


def together(several: Sequence[Steps[Result]]) -> Steps[list[Result]]:
    """Several pieces of work as one, which asks what all of them ask."""
    works = [Inquiry(steps) for steps in several]
    while not all(work.is_done for work in works):
        _tell(works, (yield [question for work in works for question in work.asks]))
    return [work.result for work in works]


def at_once(result: Result) -> Steps[Result]:
    """Work that asks nothing, and is done."""
    return result
    yield []


def _tell(works: Sequence[Inquiry[Any]], answers: Sequence[Any]) -> None:
    """Give each work its answers, which come in order."""
    begin = 0
    for work, count in [(work, len(work.asks)) for work in works if not work.is_done]:
        work.tell(list(answers[begin : begin + count]))
        begin += count
