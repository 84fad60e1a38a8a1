"""The optimizer of the meetings, against steps by hand."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_gnn_dist import EverySteps, LLCGStrategy, LocalSGDStrategy, Outer
from lightning_gnn_dist.rounds.reducer import are_finite
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.by_hand import agreement
from tests.strategies.fitting import Net, State, batches, differs, fit, local_sgd, same_start, state_of
from tests.strategies.graph_fitting import data_module, model
from tests.strategies.graph_fitting import fit as fit_on_graph
from tests.strategies.weighted_fitting import grappa

ROUNDS, STEPS = 3, 6
ADAPTIVE = Outer(lr=0.7, momentum=0.9, nesterov=True, adaptive=True)


def slow_adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def learned(rank: int, world_size: int, outers: list[Outer | None], options: dict[str, Any]) -> list[State]:
    states = []
    for outer in outers:
        module = same_start()
        fit(rank, local_sgd(outer=outer), module, devices=world_size, **({"max_epochs": ROUNDS} | options))
        states.append(state_of(module))
    return states


def by_hand(num_ranks: int, outer: Outer) -> State:
    """Local SGD, and at each meeting a step of the optimizer, replica by replica in one process."""
    model = same_start().double()
    parameters, speed = list(model.parameters()), [torch.zeros_like(each) for each in model.parameters()]
    old: list[Tensor] = []
    adam = outer.optimizer([each.data for each in parameters]) if outer.optimizer else None
    for _ in range(ROUNDS):
        before, ends = [each.detach().clone() for each in parameters], []
        for rank in range(num_ranks):
            for each, start in zip(parameters, before, strict=True):
                each.data = start.clone()
            for x, y in batches(rank, STEPS):
                gradients = torch.autograd.grad(mse_loss(model.layers(x.double()), y.double()), parameters)
                for each, gradient in zip(parameters, gradients, strict=True):
                    each.data -= 0.1 * gradient
            ends.append([each.detach().clone() for each in parameters])
        ways = [start - sum(end[place] for end in ends) / num_ranks for place, start in enumerate(before)]
        momentum = outer.momentum * (agreement(ways, old) ** 4 if outer.adaptive else 1.0)
        old = ways
        for place, (each, start, way) in enumerate(zip(parameters, before, ways, strict=True)):
            speed[place] = momentum * speed[place] + way
            step = way + momentum * speed[place] if outer.nesterov else speed[place]
            each.data = start - outer.lr * step
            if adam is not None:
                adam.param_groups[0]["params"][place].data, adam.param_groups[0]["params"][place].grad = start, way
        if adam is not None:
            adam.step()
            for each, stepped in zip(parameters, adam.param_groups[0]["params"], strict=True):
                each.data = stepped.data.clone()
    return state_of(model)


def test_a_meeting_steps_as_by_hand() -> None:
    outers = [Outer.diloco(), Outer(momentum=0.5), Outer(optimizer=slow_adam)]
    outers += [ADAPTIVE, Outer(momentum=0.8, adaptive=True)]
    expected = [by_hand(3, outer) for outer in outers]
    assert differs(expected[0], expected[3]) > 1e-3
    for found in run_ranks(learned, 3, outers, {"precision": "64-true"}):
        for state, hand in zip(found, expected, strict=True):
            assert differs(state, hand) < 1e-12


def test_the_whole_way_to_the_mean_is_averaging() -> None:
    for plain, outer in run_ranks(learned, 2, [None, Outer()], {"precision": "64-true"}):
        assert differs(plain, outer) < 1e-14


def stopped_and_resumed(rank: int, world_size: int, folder: Path, **settings: Any) -> tuple[State, State]:
    def run(rounds: int, path: Path | None = None) -> Any:
        strategy, module = local_sgd(EverySteps(4), outer=ADAPTIVE, **settings), same_start(optimizer="Adam")
        options = {"max_epochs": rounds, "ckpt_path": None if path is None else str(path)}
        return fit(rank, strategy, module, devices=world_size, **options), module

    _, whole = run(5)
    half, _ = run(2)
    half.save_checkpoint(folder / "half.ckpt")
    _, resumed = run(5, folder / "half.ckpt")
    return state_of(whole), state_of(resumed)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(stopped_and_resumed, 2, tmp_path):
        assert differs(whole, resumed) == 0.0


def resumed_with(rank: int, world_size: int, folder: Path) -> list[str]:
    """What fits with other optimizers of the meetings say when they are resumed, or that they went on."""
    path, said = folder / "one.ckpt", []
    fit(rank, local_sgd(outer=Outer.diloco()), same_start(), devices=world_size, max_epochs=1).save_checkpoint(path)
    for outer in (Outer.diloco(), None, ADAPTIVE, Outer(optimizer=lambda parameters: None)):  # type: ignore[arg-type,return-value]
        strategy = local_sgd(outer=outer)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                fit(rank, strategy, same_start(), devices=world_size, max_epochs=2, ckpt_path=str(path))
            said.append(next((str(each.message) for each in caught if "Outer" in str(each.message)), "went on"))
        except (ValueError, TypeError) as error:
            said.append(str(error))
    return said


def test_other_optimizers_of_the_meetings_are_told_apart(tmp_path: Path) -> None:
    said, _ = run_ranks(resumed_with, 2, tmp_path)
    assert said[0] == "went on" and said[1].startswith("The checkpoint holds the state of outer=Outer(...), which")
    assert said[2].startswith(
        "The optimizer of the meetings was SGD in the checkpoint, and is AgreeingMomentum in this"
    )
    assert said[3] == "outer: optimizer must return an optimizer of torch whose step needs no closure, got None."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": slow_adam, "lr": 0.5}, "nesterov and adaptive are those of the optimizer that Outer makes"),
        ({"adaptive": True}, "adaptive=True is of momentum, and momentum=0.0 is none: set momentum=0.8"),
    ],
)
def test_bad_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Outer(**settings)


# NaN on one rank ends all ranks with its name, or is left out, and never spreads.


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


POISONED: list[tuple[str, str, dict[str, Any], str]] = [
    ("grappa", "loss", {}, "The loss of rank 1 is NaN"),
    ("grappa", "loss", {"accumulate_grad_batches": 2}, "The loss of rank 1 is NaN"),
    ("grappa", "gradient", {}, "no rank's loss, is NaN"),
    ("local", "loss", {}, "meeting of round 1 the weights of rank 1 are NaN"),
]


@pytest.mark.parametrize(("strategy", "what", "options", "message"), POISONED)
def test_a_rank_that_brings_nan_is_named_on_all(strategy, what, options, message) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(poisoned, 2, strategy, what, options)
    assert sorted(error.value.failures) == [0, 1]
    assert all(message in text for text in error.value.failures.values())


def left_out(rank: int, world_size: int, rounds: int) -> tuple[State, list[int]]:
    strategy = LocalSGDStrategy(EverySteps(2), nonfinite="leave_out", **PATIENCE)
    module = Poisoned(1, optimizer="Adam", lr=0.01)
    fit(rank, strategy, module, devices=world_size, max_epochs=rounds)
    return state_of(module), strategy.state.left_out


def left_out_by_hand() -> State:
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
        assert differs(state, left_out_by_hand()) < 1e-6


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
