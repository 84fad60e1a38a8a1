"""What several pieces of work ask goes in one exchange."""

from threading import Lock
from typing import Any

import pytest

from lightning_gnn_dist.extensions.asking.turns import Inquiry, Steps, answered, at_once, take_turn, together


def adding(*numbers: int) -> Steps[int]:
    """Asks for one number after the other, and adds up the answers."""
    total = 0
    for number in numbers:
        (answer,) = yield [number]
        total += answer
    return total


def test_several_pieces_ask_at_once_until_each_is_done() -> None:
    asked: list[list[int]] = []

    def doubled(questions: list[int]) -> list[int]:
        asked.append(questions)
        return [2 * number for number in questions]

    work = together([adding(1, 2, 3), at_once(7), adding(), adding(10)])
    assert answered(work, doubled) == [12, 7, 0, 20]
    assert asked == [[1, 10], [2], [3]]


def test_work_is_given_up_where_nobody_answers() -> None:
    lock = Lock()

    def holding() -> Steps[None]:
        with lock:
            yield [1]

    def nobody(questions: list[Any]) -> list[Any]:
        raise ConnectionError

    works: list[Inquiry[Any]] = [Inquiry(holding()), Inquiry(adding(1, 2))]
    assert lock.locked()
    with pytest.raises(ConnectionError):
        take_turn(works, nobody)
    assert not lock.locked()
