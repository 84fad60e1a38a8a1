"""The optimizer of correction steps: its state, its rate, what it moves and saves, and which it cannot follow."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.wire import collectives
from tests.ranks import join, run_ranks
from tests.strategies.by_hand import ADAM, KINDS, Make, beside, correct, equal, gradient, step_by_hand, weights

kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


# Modes.


@kinds
def test_persistent_is_one_optimizer_of_the_same_kind_for_all_rounds(make: Make) -> None:
    ours, expected = weights(), weights()
    correct(beside([make(ours)], "persistent"), ours, range(3))
    by_hand = make(expected)
    for step in range(6):
        step_by_hand(by_hand, expected, step)
    assert equal(ours, expected)


@kinds
@pytest.mark.parametrize("mode", ["persistent", "averaged"])
def test_the_local_optimizer_is_left_alone(make: Make, mode: Any) -> None:
    ours, alone = weights(), weights()
    local, expected = make(ours), make(alone)
    calls: list[int] = []
    local.register_step_pre_hook(lambda *_: calls.append(1))
    step_by_hand(local, ours, 0)
    step_by_hand(expected, alone, 0)
    correct(beside([local], mode, 0.5), ours, range(2))
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in ours)
    left, right = local.state_dict(), expected.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for number, state in right["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(left["state"][number][name]), torch.as_tensor(value))


def averaged(rank: int, world_size: int) -> tuple[list[Tensor], Any, Any]:
    join(rank, world_size)
    ours = weights()
    local = torch.optim.Adam(ours, lr=0.01)
    for step in range(rank + 1):
        step_by_hand(local, ours, 10 * rank + step)
    before = {number: {k: v.clone() for k, v in s.items()} for number, s in local.state_dict()["state"].items()}
    with torch.no_grad():
        for parameter, start in zip(ours, weights(), strict=True):
            parameter.copy_(start)
    own = beside([local], "averaged")
    correct(own, ours, range(1))
    correct(own, ours, range(1, 2))
    return [parameter.detach() for parameter in ours], before, local.state_dict()["state"]


@pytest.mark.slow
def test_averaged_starts_each_round_from_the_mean_of_the_ranks() -> None:
    first, second = run_ranks(averaged, 2)
    expected = weights()
    for round_idx in range(2):
        by_hand = torch.optim.Adam(expected, lr=0.01)
        mean = {
            number: {name: (value + second[1][number][name]) / 2 for name, value in state.items()}
            for number, state in first[1].items()
        }
        by_hand.load_state_dict({"state": mean, "param_groups": by_hand.state_dict()["param_groups"]})
        for step in range(2):
            step_by_hand(by_hand, expected, 2 * round_idx + step)
    assert equal(first[0], second[0])
    for ours, theirs in zip(first[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)
    for _, before, after in (first, second):
        assert all(torch.equal(after[n][name], value) for n, state in before.items() for name, value in state.items())


def test_states_that_are_averaged_already_are_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, expected = weights(), weights()
    local, by_hand = torch.optim.Adam(ours, lr=0.01), torch.optim.Adam(expected, lr=0.01)
    own = beside([local], "averaged", are_averaged=True)
    for optimizer, parameters in ((local, ours), (by_hand, expected)):
        step_by_hand(optimizer, parameters, 0)
    monkeypatch.setattr(collectives, "average_", lambda *_: pytest.fail("sent again"))
    own.prepare(ours, 0)
    own.step(ours, gradient(1, ours))
    step_by_hand(by_hand, expected, 1)
    assert equal(ours, expected)


# The learning rate.


def test_the_rate_may_go_by_rounds() -> None:
    ours = weights()
    own = beside([torch.optim.SGD(ours, lr=0.5)], "persistent", lambda round_idx: 1.0 / (1 + round_idx))
    slopes = [torch.ones_like(parameter) for parameter in ours]
    for round_idx in (0, 3):
        before = [parameter.detach().clone() for parameter in ours]
        own.prepare(ours, round_idx)
        own.step(ours, [slope.clone() for slope in slopes])
        for start, after in zip(before, ours, strict=True):
            assert torch.allclose(start - after.detach(), torch.full_like(start, 1.0 / (1 + round_idx)))


@pytest.mark.parametrize("lr", [0.0, None, "0.1", float("nan")])
def test_a_round_without_a_rate_is_refused(lr: Any) -> None:
    ours = weights()
    own = beside([ADAM(ours)], "persistent", lambda round_idx: lr)
    with pytest.raises(ValueError, match=rf"lr must be a positive number, .* got {lr!r}\.$"):
        own.prepare(ours, 0)


@pytest.mark.parametrize("mode", ["persistent", "averaged"])
@pytest.mark.parametrize("lr", ["local", 0.125])
def test_the_rate_is_fixed_or_that_of_each_local_group(mode: Any, lr: Any) -> None:
    ours = weights(count=2)
    local = torch.optim.SGD([{"params": ours[:1], "lr": 0.5}, {"params": ours[1:], "lr": 0.25}], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(local, 1, gamma=0.5)
    own = beside([local], mode, lr)
    for round_idx, rates in enumerate([(0.5, 0.25), (0.25, 0.125), (0.125, 0.0625)]):
        before = [parameter.detach().clone() for parameter in ours]
        correct(own, ours, range(round_idx, round_idx + 1), steps=1)
        for after, start, slope, rate in zip(ours, before, gradient(round_idx, ours), rates, strict=True):
            assert torch.equal(after, start - (rate if lr == "local" else lr) * slope)
        local.step()  # without gradients: only for the schedule
        scheduler.step()


@pytest.mark.parametrize("mode", ["persistent", "averaged"])
@pytest.mark.parametrize("lr", ["local", 0.125])
def test_a_momentum_that_is_scheduled_is_followed(mode: Any, lr: Any) -> None:
    ours = weights()
    local = torch.optim.SGD(ours, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(local, 0.1, total_steps=4, base_momentum=0.5, max_momentum=0.75)
    own = beside([local], mode, lr)
    for round_idx in range(3):
        correct(own, ours, range(round_idx, round_idx + 1))
        (group,), (followed,) = own._optimizers[0].param_groups, local.param_groups
        assert group["momentum"] == followed["momentum"] and group["lr"] == (followed["lr"] if lr == "local" else lr)
        local.step()  # without gradients: only for the schedule
        scheduler.step()


# Which parameters.

EVERY_MODE = pytest.mark.parametrize("mode", ["persistent", "averaged", ADAM])


@EVERY_MODE
def test_only_what_a_local_optimizer_holds_moves(mode: Any) -> None:
    ours, before = weights(), weights()
    local: list[Optimizer] = [torch.optim.Adam(ours[:1]), torch.optim.AdamW(ours[2:])]
    correct(beside(local, mode), ours, range(2))
    assert [torch.equal(a, b) for a, b in zip(ours, before, strict=True)] == [False, True, False]
    assert all(parameter.grad is None for parameter in ours)


@EVERY_MODE
def test_what_is_frozen_does_not_move_by_an_old_gradient(mode: Any) -> None:
    ours, before = weights(), weights()
    ours[0].grad = torch.ones_like(ours[0])
    correct(beside([torch.optim.SGD(ours, lr=0.1)], mode), ours[1:], range(2))
    assert [torch.equal(a, b) for a, b in zip(ours, before, strict=True)] == [True, False, False]


@pytest.mark.parametrize("mode", ["persistent", ADAM], ids=["persistent", "function"])
@pytest.mark.parametrize("to_old_group", [False, True])
def test_unfreezing_adds_parameters_and_keeps_the_state_of_the_others(mode: Any, to_old_group: bool) -> None:
    ours, expected = weights(), weights()
    local, by_hand = ADAM(ours[1:]), ADAM(expected[1:])
    own = beside([local], mode)
    correct(own, ours[1:], range(2))
    if to_old_group:
        local.param_groups[0]["params"].insert(0, ours[0])
    else:
        local.add_param_group({"params": ours[:1]})
    correct(own, ours, range(2, 4))
    for step in range(4):
        step_by_hand(by_hand, expected[1:], step)
    by_hand.add_param_group({"params": expected[:1]})
    for step in range(4, 8):
        step_by_hand(by_hand, expected, step)
    assert equal(ours, expected)


# Checkpoints.


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mode", ["persistent", "averaged", *KINDS.values()])
@pytest.mark.parametrize("make", [KINDS["adamw"], KINDS["adagrad"]], ids=["adamw", "adagrad"])
def test_a_restored_one_goes_on_to_the_bit(mode: Any, make: Make) -> None:
    ours = weights()
    local = make(ours)
    own = beside([local], mode)
    correct(own, ours, range(3))
    saved = through_a_file(own.state())
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    again = beside([make(resumed)], mode)
    again.restore(saved, resumed)
    correct(own, ours, range(3, 5))
    correct(again, resumed, range(3, 5))
    assert equal(ours, resumed)


def test_the_state_is_a_copy_of_plain_things() -> None:
    ours = weights()
    local = ADAM(ours)
    local.param_groups[0]["lr"] = torch.linspace(0, 1, 3).numpy()[1]  # a schedule computed with numpy
    own = beside([local], "persistent")
    correct(own, ours, range(1))
    state = own.state()
    before = through_a_file(state)
    correct(own, ours, range(1, 2))
    assert torch.equal(state["optimizers"][0]["state"][0]["exp_avg"], before["optimizers"][0]["state"][0]["exp_avg"])
    assert type(state["optimizers"][0]["param_groups"][0]["lr"]) is float


def test_a_checkpoint_before_the_first_correction_holds_nothing() -> None:
    ours = weights()
    state = beside([ADAM(ours)], "persistent").state()
    beside([ADAM(ours)], "persistent").restore(state, ours)
    assert state == {"mode": "persistent", "optimizers": []}


# Refusals.


def test_another_mode_than_the_checkpoints_is_refused() -> None:
    ours = weights()
    message = "is 'averaged', this strategy's is 'persistent': resume with Correction.optimizer='averaged'., or start"
    with pytest.raises(ValueError, match=message):
        beside([ADAM(ours)], "persistent").restore({"mode": "averaged", "optimizers": []}, ours)
    with pytest.raises(ValueError, match=r"is 'function', this strategy's is 'averaged': .*=the function it was"):
        beside([ADAM(ours)], "averaged").restore(beside([ADAM(ours)], ADAM).state(), ours)


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    ours = weights()
    own = beside([ADAM(ours)], "persistent")
    correct(own, ours, range(1))
    with pytest.raises(ValueError, match=r"hold \[\[3\]\] parameters, by optimizer and group.* make \[\[2\]\]"):
        beside([ADAM(ours[1:])], "persistent").restore(own.state(), ours)


class Wrapper(torch.optim.SGD):
    """Keeps another optimizer, as look-ahead does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = ADAM(parameters)


@pytest.mark.parametrize("mode", ["persistent", "averaged"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, Wrapper])
def test_optimizers_that_cannot_be_had_twice_are_refused_but_beside_another_kind(mode: Any, kind: Any) -> None:
    ours = weights()
    way_out = r"Correction\(optimizer=lambda parameters: (torch\.optim|LazyAdam)"
    with pytest.raises(ValueError, match=rf"{kind.__name__} .* {way_out}"):
        beside([kind(ours)], mode)
    correct(beside([kind(ours)], ADAM), ours, range(1))
    assert not equal(ours, weights())


def test_a_function_must_give_an_optimizer_that_steps_along_gradients() -> None:
    ours = weights()
    with pytest.raises(TypeError, match="its result is a list"):
        beside([ADAM(ours)], lambda parameters: [ADAM(parameters)]).prepare(ours, 0)
    with pytest.raises(ValueError, match="LBFGS computes gradients itself"):
        beside([ADAM(ours)], torch.optim.LBFGS).prepare(ours, 0)
