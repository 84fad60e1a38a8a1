"""The optimizer of correction steps: what it moves, what it saves, and which optimizers it cannot follow."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gnn_dist.strategies.correction_optimizer import CorrectionOptimizer
from tests.strategies.by_hand import ADAM, KINDS, Make, correct, equal, step_by_hand, weights

# Which parameters.

EVERY_MODE = pytest.mark.parametrize("mode", ["persistent", "reset", "averaged", "sgd", ADAM])


@EVERY_MODE
def test_only_what_a_local_optimizer_holds_moves(mode: Any) -> None:
    ours, before = weights(), weights()
    local: list[Optimizer] = [torch.optim.Adam(ours[:1]), torch.optim.AdamW(ours[2:])]
    correct(CorrectionOptimizer(mode, "local"), local, ours, range(2))
    assert [torch.equal(a, b) for a, b in zip(ours, before, strict=True)] == [False, True, False]
    assert all(parameter.grad is None for parameter in ours)


@EVERY_MODE
def test_what_is_frozen_does_not_move_by_an_old_gradient(mode: Any) -> None:
    ours, before = weights(), weights()
    ours[0].grad = torch.ones_like(ours[0])
    correct(CorrectionOptimizer(mode, "local"), [torch.optim.SGD(ours, lr=0.1)], ours[1:], range(2))
    assert [torch.equal(a, b) for a, b in zip(ours, before, strict=True)] == [True, False, False]


@pytest.mark.parametrize("mode", ["persistent", ADAM], ids=["persistent", "function"])
@pytest.mark.parametrize("to_old_group", [False, True])
def test_unfreezing_adds_parameters_and_keeps_the_state_of_the_others(mode: Any, to_old_group: bool) -> None:
    ours, expected = weights(), weights()
    local, by_hand = ADAM(ours[1:]), ADAM(expected[1:])
    own = CorrectionOptimizer(mode, "local")
    correct(own, [local], ours[1:], range(2))
    if to_old_group:
        local.param_groups[0]["params"].insert(0, ours[0])
    else:
        local.add_param_group({"params": ours[:1]})
    correct(own, [local], ours, range(2, 4))
    for step in range(4):
        step_by_hand(by_hand, expected[1:], step)
    by_hand.add_param_group({"params": expected[:1]})
    for step in range(4, 8):
        step_by_hand(by_hand, expected, step)
    assert equal(ours, expected)


@pytest.mark.parametrize("mode", ["persistent", "sgd", ADAM], ids=["persistent", "sgd", "function"])
def test_a_second_fit_starts_anew(mode: Any) -> None:
    own = CorrectionOptimizer(mode, "local")
    first = weights()
    correct(own, [ADAM(first)], first, range(2))
    left = [parameter.detach().clone() for parameter in first]
    second, expected = weights(1), weights(1)
    correct(own, [ADAM(second)], second, range(2, 4))
    correct(CorrectionOptimizer(mode, "local"), [ADAM(expected)], expected, range(2, 4))
    assert equal(second, expected) and equal(first, left)
    again = [nn.Parameter(parameter.detach().clone()) for parameter in second]
    correct(own, [ADAM(second)], second, range(4, 6))  # the same module with new local optimizers
    correct(CorrectionOptimizer(mode, "local"), [ADAM(again)], again, range(4, 6))
    assert equal(second, again)


# Checkpoints.


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mode", ["persistent", "reset", "averaged", "sgd", *KINDS.values()])
@pytest.mark.parametrize("make", [KINDS["adamw"], KINDS["adagrad"]], ids=["adamw", "adagrad"])
def test_a_restored_one_goes_on_to_the_bit(mode: Any, make: Make) -> None:
    ours = weights()
    local = make(ours)
    own = CorrectionOptimizer(mode, "local")
    correct(own, [local], ours, range(3))
    saved = through_a_file(own.state())
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    again = CorrectionOptimizer(mode, "local")
    local_again = make(resumed)
    again.restore(saved, [local_again], resumed)
    correct(own, [local], ours, range(3, 5))
    correct(again, [local_again], resumed, range(3, 5))
    assert equal(ours, resumed)


def test_after_unfreezing_a_functions_state_is_restored() -> None:
    ours = weights()
    local = ADAM(ours[1:])
    own = CorrectionOptimizer(ADAM, "local")
    correct(own, [local], ours[1:], range(2))
    local.add_param_group({"params": ours[:1]})
    correct(own, [local], ours, range(2, 3))
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    local_again = ADAM(resumed[1:])
    local_again.add_param_group({"params": resumed[:1]})
    again = CorrectionOptimizer(ADAM, "local")
    again.restore(through_a_file(own.state()), [local_again], resumed)
    correct(own, [local], ours, range(3, 5))
    correct(again, [local_again], resumed, range(3, 5))
    assert equal(ours, resumed)


def test_the_state_is_a_copy_of_plain_things() -> None:
    ours = weights()
    local = ADAM(ours)
    local.param_groups[0]["lr"] = torch.linspace(0, 1, 3).numpy()[1]  # a schedule computed with numpy
    own = CorrectionOptimizer("persistent", "local")
    correct(own, [local], ours, range(1))
    state = own.state()
    before = through_a_file(state)
    correct(own, [local], ours, range(1, 2))
    assert torch.equal(state["optimizers"][0]["state"][0]["exp_avg"], before["optimizers"][0]["state"][0]["exp_avg"])
    assert type(state["optimizers"][0]["param_groups"][0]["lr"]) is float


@pytest.mark.parametrize("mode", ["reset", "averaged"])
def test_modes_that_start_anew_save_only_their_name(mode: Any) -> None:
    ours = weights()
    own = CorrectionOptimizer(mode, "local")
    correct(own, [ADAM(ours)], ours, range(1))
    assert own.state() == {"mode": mode, "optimizers": []}


def test_a_checkpoint_before_the_first_correction_holds_nothing() -> None:
    ours = weights()
    state = CorrectionOptimizer("persistent", "local").state()
    CorrectionOptimizer("persistent", "local").restore(state, [ADAM(ours)], ours)
    assert state == {"mode": "persistent", "optimizers": []}


# Refusals.


def test_another_mode_than_the_checkpoints_is_refused() -> None:
    ours = weights()
    message = "is 'sgd', this strategy's is 'persistent': resume with Correction.optimizer='sgd'., or start"
    with pytest.raises(ValueError, match=message):
        CorrectionOptimizer("persistent", "local").restore({"mode": "sgd", "optimizers": []}, [ADAM(ours)], ours)
    with pytest.raises(ValueError, match=r"is 'function', this strategy's is 'sgd': .*=the function it was"):
        CorrectionOptimizer("sgd", "local").restore(CorrectionOptimizer(ADAM, "local").state(), [ADAM(ours)], ours)


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    ours = weights()
    own = CorrectionOptimizer("persistent", "local")
    correct(own, [ADAM(ours)], ours, range(1))
    with pytest.raises(ValueError, match=r"hold \[\[3\]\] parameters, by optimizer and group.* make \[\[2\]\]"):
        CorrectionOptimizer("persistent", "local").restore(own.state(), [ADAM(ours[1:])], ours)


class Wrapper(torch.optim.SGD):
    """Keeps another optimizer, as look-ahead does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = ADAM(parameters)


@pytest.mark.parametrize("mode", ["persistent", "reset", "averaged"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, Wrapper])
def test_optimizers_that_cannot_be_had_twice_are_refused(mode: Any, kind: Any) -> None:
    ours = weights()
    way_out = r"Correction\(optimizer=lambda parameters: (torch\.optim|LazyAdam)"
    with pytest.raises(ValueError, match=rf"{kind.__name__} .* {way_out}"):
        CorrectionOptimizer(mode, "local").prepare([kind(ours)], ours, 0)


@pytest.mark.parametrize("mode", ["sgd", ADAM], ids=["sgd", "function"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, Wrapper])
def test_they_are_fine_beside_a_correction_of_another_kind(mode: Any, kind: Any) -> None:
    ours = weights()
    correct(CorrectionOptimizer(mode, "local"), [kind(ours)], ours, range(1))
    assert not equal(ours, weights())


def test_a_function_must_give_an_optimizer_that_steps_along_gradients() -> None:
    ours = weights()
    with pytest.raises(TypeError, match="its result is a list"):
        CorrectionOptimizer(lambda parameters: [ADAM(parameters)], "local").prepare([ADAM(ours)], ours, 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="LBFGS computes gradients itself"):
        CorrectionOptimizer(torch.optim.LBFGS, "local").prepare([ADAM(ours)], ours, 0)
