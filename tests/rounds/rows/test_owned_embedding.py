"""Tables that live with one rank each: fits of them are those of tables that every rank holds whole."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_gnn_dist.rounds.rows.owned_embedding import OwnedEmbedding
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.rounds.rows.fitting import NUM_ROWS, WIDTH, Made, Table, state_of
from tests.rounds.rows.test_table_gradients import Loader, by_hand
from tests.strategies.fitting import differs, fit


class Owned(Table):
    """Regression on rows that begin as those of a Table."""

    def __init__(self, optimizer: str = "LazyAdam") -> None:
        super().__init__(optimizer)
        rows = OwnedEmbedding(NUM_ROWS, WIDTH).double()
        rows.load_state_dict(self.rows.state_dict())
        self.rows = rows  # type: ignore[assignment]

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step([batch.x, batch.ids, batch.y])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True, batch_size=batch.batch_size)


def owned(rank: int, world_size: int, optimizer: str, options: dict[str, Any]) -> Made:
    module = Owned(optimizer)
    fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=2, **options)
    here = module.rows.parameter
    assert len(here) == NUM_ROWS // world_size
    return state_of(module)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "options"),
    [
        (3, "LazyAdam", {}),
        (2, "SGD", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        pytest.param(2, "LazyAdam", {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_steps_are_those_of_one_process_on_all_batches(
    world_size: int, optimizer: str, options: dict[str, Any]
) -> None:
    ranks = run_ranks(owned, world_size, optimizer, options)
    hand = {"accumulate": options.get("accumulate_grad_batches", 1), "clip": options.get("gradient_clip_val", 0.0)}
    expected = by_hand(world_size, optimizer, **hand)
    for state in ranks:
        assert differs(state, ranks[0]) == 0.0
    assert differs(ranks[0], expected) < 1e-12
