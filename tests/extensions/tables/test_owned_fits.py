"""Rows that live with one rank each, from end to end: steps by hand, and a rank that stands still."""

from typing import Any

import pytest
import torch

from lightning_gnn_dist import GrappaStrategy, Launch
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import Made, owned, state_of
from tests.extensions.tables.test_table_gradients import Loader, OfData, Owned
from tests.ranks import run_ranks
from tests.strategies.fitting import differs, fit
from tests.wire.test_hosts import InTraining, check_stalled

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:You defined a `validation_step`")]


class ByHand(OfData):
    """Steps two optimizers by hand, one of which takes sparse gradients alone, and throws some gradients away."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> Any:
        optimizers: Any = self.optimizers()
        self.manual_backward(super().training_step(batch) * 100)
        for each in optimizers:
            each.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.manual_backward(super().training_step(batch) / 2)
        for each in optimizers:
            self.clip_gradients(each, 0.1)
            each.step()

    def configure_optimizers(self) -> Any:
        others = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return [torch.optim.SparseAdam(list(self.rows.parameters()), lr=0.05), others]


def both(rank: int, world_size: int) -> list[Made]:
    """The end of fits of a table that all ranks hold, and of one that no rank does."""
    modules = [ByHand(), owned(ByHand())]
    for module in modules:
        fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=2)
    return [state_of(module) for module in modules]


def test_steps_by_hand_are_those_of_a_table_that_all_ranks_hold() -> None:
    (first, _), (second, _) = ranks = run_ranks(both, 2)
    assert differs(first, second) == 0.0
    for replicated, whole in ranks:
        assert differs(whole, replicated) < 1e-12


# A rank that stands still while others wait for its rows is named by them.


class AtOwnedRows(InTraining, Owned):
    pass


def at_rows(rank: int, world_size: int, launch: Launch) -> None:
    fit(rank, GrappaStrategy(launch=launch), AtOwnedRows(), devices=world_size, train=Loader(rank), max_epochs=2)


def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(at_rows)
