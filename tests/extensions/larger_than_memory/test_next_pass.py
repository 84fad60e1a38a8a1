"""The first bulks of the next pass are made during the last batches of a pass, where these need rows from elsewhere."""

import gc
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Loading
from lightning_gnn_dist.batches.batches import Batches, Passes
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.extensions.larger_than_memory.files import DiskRows, FileSource
from lightning_gnn_dist.homes.run import passes_left
from lightning_gnn_dist.sampling.turns import Inquiry, Steps, answered, at_once, take_turn, together
from tests.batch_contents import check_same, contents
from tests.batches.test_batches import wait_until
from tests.extensions.larger_than_memory.test_file_source import saved
from tests.loaders import Recorder, over, threads

SEEDS, PASSES = torch.arange(400), [range(0, 5), range(5, 10), range(10, 15)]


class Setting:
    """A loader of five batches in a pass over a graph in files, and which of them were drawn."""

    def __init__(self, folder: Path, **options: Any) -> None:
        graph, self.sampler = saved(folder), Recorder()
        rows = DiskRows.of(graph, 5000)
        assert rows is not None
        self.rows, self.expected = (
            rows,
            over(GraphSource(graph, Recorder(), all_labels=False), SEEDS, 5, seed=3),
        )
        source: Any = FileSource(graph, rows, self.sampler, Loading())
        self.loader = over(source, SEEDS, 5, seed=3, bulk_size=2, **options)

    def take(self, numbers: range, *then: range) -> None:
        """Take the batches of a pass, as the training does: it never asks for one more."""
        batches, expected = (
            self.loader.between(numbers.start, numbers.stop, then[-1].stop if then else 0),
            self.expected.between(numbers.start, numbers.stop),
        )
        found = [contents(next(batches)) for _ in numbers]
        batches.close()
        check_same(found, list(map(contents, expected)))


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    setting = Setting(tmp_path)
    yield setting
    setting.loader.close()
    setting.rows.close()
    gc.collect()
    assert not threads()


def test_the_next_pass_is_begun_before_it_is_asked_for(setting: Setting) -> None:
    setting.take(PASSES[0], *PASSES[1:])
    assert len(threads()) == 1 and wait_until(lambda: 5 in setting.sampler.asked)
    setting.take(PASSES[1], PASSES[2])
    assert len(threads()) == 1 and wait_until(lambda: 10 in setting.sampler.asked)
    setting.take(PASSES[2])
    assert setting.sampler.asked == list(range(15))  # each once
    assert not threads()


def test_a_pass_that_nobody_expected_is_made_anew(setting: Setting) -> None:
    setting.take(PASSES[0], PASSES[1])
    setting.take(PASSES[2], range(15, 20))
    setting.take(range(1, 5))
    assert not threads()


def test_a_pass_that_is_left_ends_what_was_begun(setting: Setting) -> None:
    batches = setting.loader.between(0, 5, 15)
    next(batches)
    batches.close()
    assert not threads()
    setting.take(PASSES[0], PASSES[1])
    setting.loader.close()
    assert not threads()
    setting.take(PASSES[1], PASSES[2])


def test_without_threads_nothing_is_begun(tmp_path: Path) -> None:
    setting = Setting(tmp_path, num_threads=0)
    setting.take(PASSES[0], PASSES[1])
    assert setting.sampler.asked == list(range(5)) and not threads()
    setting.rows.close()


def trainer(**options: Any) -> Any:
    usual = {"training": True, "reload_dataloaders_every_n_epochs": 0, "max_epochs": 10, "current_epoch": 0}
    return SimpleNamespace(**usual | {"max_steps": -1, "global_step": 0, "accumulate_grad_batches": 1} | options)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, 9),
        ({"current_epoch": 9}, 0),
        ({"max_epochs": -1}, float("inf")),
        ({"max_epochs": None, "max_steps": 11}, 2),
        ({"max_steps": 10, "global_step": 5}, 0),
        ({"max_steps": 11, "accumulate_grad_batches": 2}, 3),
        ({"training": False}, 0),
        ({"reload_dataloaders_every_n_epochs": 1}, 0),
    ],
    ids=str,
)
def test_how_many_passes_follow(options: dict[str, Any], left: float) -> None:
    assert passes_left(trainer(**options), 5) == left
    assert passes_left(None, 5) == 0


@pytest.mark.parametrize(
    ("options", "until"),
    [
        ({}, 16),
        ({"num_left": lambda: 1}, 12),
        ({"every": 3}, 12),  # the pass after it is of another part
        ({"every": 2}, 8),
        ({"overfits": True}, 4),
        ({"num_used": lambda: 3}, 8),  # the pass ends before its last batch
    ],
    ids=["two more", "one more", "another part", "another part at once", "overfits", "limited"],
)
def test_passes_of_the_same_part_follow(options: dict[str, Any], until: int) -> None:
    asked: list[Any] = []

    class Asked(Batches):
        def between(self, start: int, stop: int | None, until: int = 0) -> Any:
            asked.append((start, stop, until))
            return iter(())

    every = options.pop("every", None)
    part: Any = None  # nobody asks for it
    batches = Asked(lambda _: part, 4, every=every, passes=Passes(**{"num_left": lambda: 2} | options))
    batches.set_epoch(1)
    assert list(batches) == []
    start = 0 if options.get("overfits") else 4
    assert asked == [(start, start + 4, until)]


def test_the_next_round_is_begun_when_a_round_is_over(setting: Setting) -> None:
    makes: Any = setting.loader.learning(0).source
    still = [True]
    batches = GlobalBatches(makes, SEEDS, 80, 3, 2, in_background=True, follows=lambda: still[0])
    expected = GlobalBatches(setting.expected.learning(0).source, SEEDS, 80, 3)

    def take(round_idx: int, start: int, stop: int) -> None:
        found = list(map(contents, batches.of_round(round_idx, 0, 2, start, stop)))
        check_same(found, list(map(contents, expected.of_round(round_idx, 0, 2, start, stop))))

    take(0, 1, 4)
    assert len(threads()) == 1 and wait_until(lambda: 5 + 1 in setting.sampler.asked)
    asked = len(setting.sampler.asked)
    take(1, 1, 1)  # takes none
    take(1, 1, 3)  # of which the first one was there
    assert len(threads()) == 1 and wait_until(lambda: len(setting.sampler.asked) == asked + 2)
    take(7, 0, 2)  # which nobody expected
    take(8, 0, 1)
    still[0] = False
    take(9, 0, 4)
    assert not threads()
    still[0] = True
    take(10, 0, 4)
    batches.close()
    assert not threads()
    next(batches.of_round(11, 0, 2, 0, 4))
    gc.collect()
    assert not threads()


# What several pieces of work ask goes in one exchange.


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
