"""NaN on one rank ends all ranks with its name, or is left out, and never spreads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gnn_dist import EverySteps, LLCGStrategy, LocalSGDStrategy
from lightning_gnn_dist.rounds.reducer import are_finite
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, state_of
from tests.strategies.graph_fitting import data_module, model
from tests.strategies.graph_fitting import fit as fit_on_graph
from tests.strategies.weighted_fitting import grappa


class Poisoned(Net):
    """The loss of one rank is NaN at its third step, or its gradient alone."""

    def __init__(self, rank: int, what: str = "loss", **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(**options)
        self.rank, self.what, self.steps = rank, what, 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch)
        if self.global_rank != self.rank or self.steps != 3:
            return loss
        if self.what == "loss":
            return loss * float("nan")
        return loss + self.layers[0].weight.mul(0.0).sqrt().sum()  # a root of zero: its derivative is infinite


def poisoned(rank: int, world_size: int, strategy: str, what: str, options: dict[str, Any]) -> None:
    module = Poisoned(1, what)
    try:
        if strategy == "local":
            fit(rank, LocalSGDStrategy(EverySteps(2), **PATIENCE), module, devices=world_size, **options)
        else:
            fit(rank, grappa(), module, devices=world_size, **options)
    finally:
        assert strategy == "local" or are_finite(module.parameters())  # the step was not taken


CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("grappa", "loss", {}, "The loss of rank 1 is NaN"),
    ("grappa", "loss", {"accumulate_grad_batches": 2}, "The loss of rank 1 is NaN"),
    ("grappa", "gradient", {}, "no rank's loss, is NaN"),
    ("local", "loss", {}, "meeting of round 1 the weights of rank 1 are NaN"),
]


@pytest.mark.parametrize(("strategy", "what", "options", "message"), CASES)
def test_a_rank_that_brings_nan_is_named_on_all(
    strategy: str, what: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(poisoned, 2, strategy, what, options)
    assert sorted(error.value.failures) == [0, 1]
    assert all(message in text for text in error.value.failures.values())


def left_out(rank: int, world_size: int, rounds: int) -> tuple[State, list[int]]:
    strategy = LocalSGDStrategy(EverySteps(2), nonfinite="leave_out", **PATIENCE)
    module = Poisoned(1, optimizer="Adam", lr=0.01)
    fit(rank, strategy, module, devices=world_size, max_epochs=rounds)
    return state_of(module), strategy.state.left_out


def by_hand() -> State:
    """Two rounds of two Adam steps; the second round's average is that of ranks 0 and 2."""
    modules = [Poisoned(9) for _ in range(3)]
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in modules]
    data = [list(batches(rank)) for rank in range(3)]
    for round_idx, voters in enumerate(([0, 1, 2], [0, 2])):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            for x, y in data[rank][2 * round_idx : 2 * round_idx + 2]:
                optimizer.zero_grad()
                nn.functional.mse_loss(module.layers(x), y).backward()
                optimizer.step()
        with torch.no_grad():
            for together in zip(*(module.parameters() for module in modules), strict=True):
                mean = torch.stack([together[rank] for rank in voters]).mean(0)
                for parameter in together:
                    parameter.copy_(mean)
    return state_of(modules[0])


def test_a_rank_that_is_left_out_gets_the_mean_of_the_others() -> None:
    for state, ranks in run_ranks(left_out, 3, 2):
        assert ranks == [1]
        assert differs(state, by_hand()) < 1e-6


def test_a_rank_that_was_left_out_learns_on() -> None:
    for state, ranks in run_ranks(left_out, 2, 4):
        assert ranks == [] and are_finite(state.values())


def corrected(rank: int, world_size: int, nonfinite: Any) -> bool:
    module = model()
    if rank == 1:
        own_step = module.training_step
        module.training_step = lambda batch: own_step(batch) * float("nan")
    strategy = LLCGStrategy(EverySteps(2), nonfinite=nonfinite, **PATIENCE)  # type: ignore[arg-type]
    fit_on_graph(strategy, module, data_module(), world_size)
    return are_finite(module.parameters())


def test_a_correction_that_is_nan_is_named_or_left_out() -> None:
    with pytest.raises(RankError, match="The correction of rank 1 is NaN") as error:
        run_ranks(corrected, 2, "refuse")
    assert sorted(error.value.failures) == [0, 1]
    assert run_ranks(corrected, 2, "leave_out") == [True, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_wherever_it_is(value: float) -> None:
    tensors = [torch.zeros(3), torch.ones(2, 2, dtype=torch.float64), torch.arange(3), torch.zeros(0)]
    assert are_finite(tensors) and are_finite([])
    assert are_finite([torch.full((2,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)])
    tensors[1][1, 0] = value
    assert not are_finite(tensors)
