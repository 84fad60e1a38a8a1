"""A small fit in rounds, to hold laws of local SGD against."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gnn_dist import LocalSGDStrategy
from tests.every_strategy import PATIENCE
from tests.strategies.fitting import Net, State, fit, state_of


def local_sgd(clock: Any = None, **options: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(clock, **PATIENCE, **options)


def same_start(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def before_and_after(
    rank: int, world_size: int, kind: Any, clock: Any, train: Any = None, **options: Any
) -> tuple[State, State]:
    """The weights of a rank before its first meeting and after it."""
    before: list[State] = []

    class Watch(kind):  # type: ignore[misc]
        def end_round(self) -> None:
            before.append(state_of(self._module()))
            super().end_round()

    module = same_start()
    fit(rank, Watch(clock, **PATIENCE, **options), module, devices=world_size, train=train, max_epochs=1)
    return before[0], state_of(module)
