"""Law 6: on one rank every strategy is plain Lightning, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_gnn_dist import Drift, EverySteps, GrappaStrategy, LLCGStrategy, LocalSGDStrategy, TMAStrategy
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import Batched, data_module, fit, model

# A pass has ten steps.
MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: SingleDeviceStrategy(torch.device("cpu")),
    "grappa": lambda: GrappaStrategy(**PATIENCE),
    "local_sgd": lambda: LocalSGDStrategy(**PATIENCE),
    "local_sgd of equal weights": lambda: LocalSGDStrategy(EverySteps(10), weights="uniform", **PATIENCE),
    "tma": lambda: TMAStrategy(EverySteps(10), **PATIENCE),
    "llcg": lambda: LLCGStrategy(**PATIENCE),
    "llcg with drift of ranks": lambda: LLCGStrategy(drift=Drift("ranks"), buffers="global", **PATIENCE),
}


def alone(rank: int, world_size: int) -> dict[str, State]:
    found = {}
    for name, make in MADE.items():
        module = model(Batched, dropout=0.5)
        torch.manual_seed(1)
        fit(make(), module, data_module(), 1, gradient_clip_val=0.5)
        found[name] = state_of(module)
    return found


@pytest.fixture(scope="module")
def states() -> dict[str, State]:
    (found,) = run_ranks(alone, 1)
    return found


@pytest.mark.parametrize("name", MADE)
def test_it_is_plain_lightning(name: str, states: dict[str, State]) -> None:
    assert differs(states[name], states["plain"]) == 0.0
