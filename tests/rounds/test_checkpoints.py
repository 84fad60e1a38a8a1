"""What a checkpoint says of the ranks is believed only where it fits, and else refused with the file's name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_gnn_dist.rounds.checkpoints import KEY, random_state, take_from_checkpoint, take_of_gradients


def checkpoint(**changes: Any) -> dict[str, Any]:
    state = {"state": {}, "param_groups": [{"lr": 0.1}]}
    rank = {
        "batches_done": 3,
        "optimizer_states": [state],
        "buffers": {"b": torch.zeros(1)},
        "random_state": random_state(),
        "extra": {},
    }
    saved = {"version": 1, "round_idx": 2, "ranks": [rank]}
    return {"optimizer_states": [state], "state_dict": {}, KEY: saved | changes}


def of_rank(**changes: Any) -> dict[str, Any]:
    whole = checkpoint()
    whole[KEY]["ranks"][0] |= changes
    return whole


def without(name: str) -> dict[str, Any]:
    whole = checkpoint()
    for content in (whole[KEY], whole[KEY]["ranks"][0]):
        content.pop(name, None)
    return whole


def test_a_whole_one_is_taken() -> None:
    state = take_from_checkpoint(checkpoint(), "a.ckpt")
    assert (state.round_idx, state.batches_done) == (2, 3)


NUMBERS = [None, -1, True, 1.5, "x", [], {}]
DAMAGED = [
    *({"round_idx": value} for value in NUMBERS),
    *({"version": value} for value in NUMBERS),
    *({"ranks": value} for value in [{}, "x", True, 1, [None], [1], [[]]]),
]
NAMES = ["version", "round_idx", "ranks", "batches_done", "optimizer_states", "buffers", "random_state", "extra"]
OF_RANKS = [
    *({"batches_done": value} for value in NUMBERS),
    *({"optimizer_states": value} for value in [[], None, [1], [{}], [{"state": [], "param_groups": []}]]),
    *({"buffers": value} for value in [None, [], {"b": 1}]),
    *({"random_state": value} for value in [None, {}, {"cpu": 1}, {"cpu": torch.zeros(3)}]),
    {"extra": None},
]
CASES: list[Callable[[], dict[str, Any]]] = [
    *(lambda change=change: checkpoint(**change) for change in DAMAGED),  # type: ignore[misc]
    *(lambda change=change: of_rank(**change) for change in OF_RANKS),  # type: ignore[misc]
    *(lambda name=name: without(name) for name in NAMES),  # type: ignore[misc]
    *(lambda value=value: checkpoint() | {KEY: value} for value in [None, [], "x", 1]),  # type: ignore[misc]
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_damaged_one_is_refused(case: int) -> None:
    with pytest.raises(ValueError, match=r"^a\.ckpt is damaged \("):
        take_from_checkpoint(CASES[case](), "a.ckpt")


@pytest.mark.parametrize("change", [{"random_state": None}, {"random_state": {"cpu": 1}}, {"buffers": [1]}])
def test_that_of_gradients_too(change: dict[str, Any]) -> None:
    whole = of_rank(**change)
    whole[KEY]["strategy"] = "grappa"
    with pytest.raises(ValueError, match=r"^a\.ckpt is damaged \("):
        take_of_gradients(whole, "a.ckpt")


def test_that_of_another_number_of_ranks_goes_on_with_a_warning() -> None:
    whole = checkpoint(strategy="grappa")
    whole[KEY]["ranks"] *= 2
    with pytest.warns(UserWarning, match="was written by 2 ranks, and this fit has 1: it goes on with other parts"):
        assert take_of_gradients(whole) is None


def test_that_of_steps_in_several_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is of a fit with Holding\(AsRanks\(\.\.\.\)\), which went\. .*weights"):
        take_of_gradients(checkpoint(strategy="grappa", batches_of_step=4))
