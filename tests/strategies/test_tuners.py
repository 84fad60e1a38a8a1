"""Lightning's searches before a fit leave no trace in it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.every_strategy import every_strategy
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import Batched, data_module, fit, model

STRATEGIES = every_strategy(2)


def searched(rank: int, world_size: int, folder: str) -> dict[str, tuple[State, State, int]]:
    found = {}
    for name, strategy in STRATEGIES.items():
        states, finder = [], LearningRateFinder(num_training_steps=4, update_attr=False)
        for callbacks in ([], [finder]):
            module = model(Batched)
            options: dict[str, Any] = {"callbacks": callbacks, "limit_val_batches": 0, "default_root_dir": folder}
            fit(strategy(), module, data_module(), world_size, **options)
            states.append(state_of(module))
        assert finder.optimal_lr is not None
        found[name] = states[0], states[1], len(finder.optimal_lr.results["lr"])
    return found


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_fit_after_a_search_of_the_rate_is_the_fit_without(tmp_path: Any) -> None:
    for of_rank in run_ranks(searched, 2, str(tmp_path)):
        for plain, after, num_rates in of_rank.values():
            assert differs(plain, after) == 0.0 and num_rates >= 4


def search_size(rank: int, world_size: int) -> None:
    for strategy in STRATEGIES.values():
        with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
            fit(strategy(), model(), data_module(), world_size, callbacks=[BatchSizeFinder()])


def test_lightning_refuses_to_search_the_batch_size() -> None:
    search_size(0, 1)
