"""Data modules that think they are those of some rank, without a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.loaders import batches_of_part


def placed(data: Any, rank: int, num_ranks: int) -> Any:
    """The data module, which thinks from now on that it is this rank's."""
    data._enter(replace(data._home.running, rank=rank, num_ranks=num_ranks))
    return data


@contextmanager
def placing(data: Any, rank: int, num_ranks: int) -> Iterator[Any]:
    yield placed(data, rank, num_ranks)
    placed(data, 0, 1)


def batches_of(data: Any, part: Any, num_batches: int, seed: int, rank: int, num_ranks: int) -> Any:
    """The loader of a rank's training batches of a part."""
    with placing(data, rank, num_ranks):
        learning = data._task.learned(part, num_batches, seed * num_ranks + rank)
        return batches_of_part(learning, **data._home.running.options_of_batches)


def most_seeds(data: Any, num_ranks: int) -> int:
    """How much the rank learns that learns most."""
    with placing(data, 0, num_ranks):
        return data._task.most()  # type: ignore[no-any-return]


def seeds_and_source(data: Any, part: Any, rank: int, num_ranks: int) -> Any:
    """What a rank learns of a part, and the source of its batches."""
    with placing(data, rank, num_ranks):
        learning = data._task.learned(part, 1, rank)
        return learning.deal.seeds, learning.source
