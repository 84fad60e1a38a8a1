"""The optimizer of the meetings, against steps by hand."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lightning_gnn_dist import EverySteps, Outer
from tests.ranks import run_ranks
from tests.strategies.by_hand import agreement
from tests.strategies.fitting import State, batches, differs, fit, local_sgd, same_start, state_of

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
