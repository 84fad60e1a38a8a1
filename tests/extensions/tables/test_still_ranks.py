"""A rank that stands still while others wait for its rows is named by them."""

import pytest

from lightning_gnn_dist import GrappaStrategy, Launch
from tests.extensions.tables.test_table_gradients import Loader, Owned
from tests.strategies.fitting import fit
from tests.wire.test_channel import InTraining, check_stalled


class AtOwnedRows(InTraining, Owned):
    pass


def at_rows(rank: int, world_size: int, launch: Launch) -> None:
    fit(rank, GrappaStrategy(launch=launch), AtOwnedRows(), devices=world_size, train=Loader(rank), max_epochs=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(at_rows)
