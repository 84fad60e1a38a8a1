"""Lightning's searches before a fit leave no trace in it."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gnn_dist import EverySteps, Launch, LocalSGDStrategy, Outer
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import Batched, data_module, fit, model

STRATEGIES = every_strategy(2) | {"outer": lambda: LocalSGDStrategy(EverySteps(2), outer=Outer.diloco(), **PATIENCE)}


def searched(rank: int, world_size: int, folder: str, strategies: Any = None) -> dict[str, tuple[State, State, int]]:
    found = {}
    for name, strategy in (strategies or STRATEGIES).items():
        states, finder = [], LearningRateFinder(num_training_steps=4, update_attr=False)
        for callbacks in ([], [finder]):
            module = model(Batched)
            options: dict[str, Any] = {"callbacks": callbacks, "limit_val_batches": 0, "default_root_dir": folder}
            fit(strategy(), module, data_module(), world_size, **options)
            states.append(state_of(module))
        assert finder.optimal_lr is not None
        found[name] = states[0], states[1], len(finder.optimal_lr.results["lr"])
    return found


@pytest.mark.slow
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


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_search_in_ranks_that_are_forked_comes_back() -> None:
    strategy = LocalSGDStrategy(launch=Launch(start_method="fork"))
    module = model()
    module.save_hyperparameters({"lr": 0.5})
    module.lr = 0.5
    found = Tuner(trainer(2, strategy, max_epochs=9)).lr_find(
        module, data_module(), num_training=20, early_stop_threshold=None
    )
    assert found is not None and len(found.results["lr"]) == 20
    assert module.lr == module.hparams.lr == found.suggestion() not in (0.5, None)  # the rate of the next fit
