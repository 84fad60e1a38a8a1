"""What several pieces of work ask goes in one exchange, and bulks are drawn beside the rows of those before them."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Loading
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.larger_than_memory.ahead import AheadSource
from lightning_gnn_dist.extensions.larger_than_memory.row_cache import Caches, RowCache
from lightning_gnn_dist.sampling.turns import Inquiry, Steps, answered, at_once, take_turn, together


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


class Bulk:
    def __init__(self, number: int) -> None:
        self.number, self.samples = number, list[Sample]()


class Rows:
    """Asks for the rows of bulks, and knows what was known of the next ones then."""

    def __init__(self, num_rows: int) -> None:
        self.known = list[list[int]]()
        self.cache = Caches([RowCache({"x": torch.empty(0, 1)}, num_rows)], 4 * num_rows)

    def seek(self, samples: list[int]) -> Bulk:
        return Bulk(*samples)

    def fill(self, bulk: Bulk, coming: Sequence[Bulk], *_: object, **options: object) -> Steps[list[SampledData]]:
        self.known.append([other.number for other in coming])
        (answer,) = yield [f"{bulk.number} rows"]
        assert answer == f"{bulk.number} rows!"
        return []


class TwoHops(AheadSource):
    """Tells what it asks, in which turn."""

    def __init__(self, ahead_bytes: int, num_rows: int = 0) -> None:
        self.rows: Any = Rows(num_rows)
        super().__init__(self.rows, 1, Loading(ahead_bytes=ahead_bytes), None, None)
        self.turns = list[list[str]]()

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[Any]:
        (key,) = keys
        for hop in (1, 2):
            (answer,) = yield [f"{key.batch}.{hop}"]
            assert answer == f"{key.batch}.{hop}!"
        return [key.batch]

    def _ask(self, questions: list[Any]) -> Sequence[Any]:
        self.turns.append(questions)
        return [f"{question}!" for question in questions]

    def of_bulks(self, count: int) -> list[str]:
        bulks: list[Any] = [([], [BatchKey(0, 0, number)], None) for number in range(count)]
        for _ in self.make_in_turn(iter(bulks)):
            pass
        return [" ".join(turn) for turn in self.turns]


def test_a_bulk_is_drawn_beside_the_rows_of_those_before() -> None:
    assert TwoHops(1).of_bulks(1) == ["0.1", "0.2", "0 rows"]
    assert TwoHops(1).of_bulks(6) == [
        *("0.1", "0.2", "0 rows 1.1", "1.2 2.1 3.1", "1 rows 2.2 3.2", "2 rows 4.1", "3 rows 4.2 5.1"),
        *("4 rows 5.2", "5 rows"),
    ]


def test_without_memory_nothing_is_drawn_before_it_is_due() -> None:
    assert TwoHops(0).of_bulks(2) == ["0.1", "0.2", "0 rows", "1.1", "1.2", "1 rows"]


def test_a_cache_knows_seven_bulks_more() -> None:
    source = TwoHops(1, num_rows=1)
    assert len(source.of_bulks(40)) == 43
    assert source.rows.known[12] == list(range(13, 20)) and max(map(len, source.rows.known)) == 7
