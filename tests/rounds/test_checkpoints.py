"""What a checkpoint says of the ranks is believed only where it fits, and else refused with the file's name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnn_dist.rounds.checkpoints import KEY, random_state, take_from_checkpoint, take_of_gradients
from lightning_gnn_dist.rounds.lightning_internals import (
    Replaced,
    hear_skips,
    log_numbers,
    refuse_stop_iteration,
    take_over_bar,
    take_over_estimate,
    take_over_sigterm,
)


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


TAKES = take_from_checkpoint, take_of_gradients
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


def test_a_damaged_one_is_refused() -> None:
    for case in CASES:
        with pytest.raises(ValueError, match=r"^a\.ckpt is damaged \("):
            take_from_checkpoint(case(), "a.ckpt")


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


REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (take_of_gradients, checkpoint(), "by a strategy of rounds, whose epochs are rounds .* and leave ckpt_path out"),
    (
        take_of_gradients,
        checkpoint(strategy="grappa", batches_of_step=4),
        r"is of a fit with Holding\(AsRanks\(.*weights",
    ),
    (take_from_checkpoint, checkpoint(strategy="grappa"), "not written by a strategy of rounds"),
    (take_from_checkpoint, {"state_dict": {}}, "not written by a strategy of rounds"),
    (take_from_checkpoint, checkpoint(ranks=[{}, {}]), "written by 2 ranks, and this fit has 1"),
    (take_from_checkpoint, checkpoint(version=2), "has version 2, .* reads up to 1: upgrade"),
    *((take, checkpoint(ranks=None), "after an exception, by one rank, .* Resume from another") for take in TAKES),
]


@pytest.mark.parametrize(("take", "content", "message"), REFUSED)
def test_what_cannot_be_gone_on_with_is_refused(take: Any, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(content)


# What is replaced of Lightning is there, says so where it is not, and is given back.


class Skips(pl.LightningModule):
    """Leaves every epoch."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> int:
        return -1


def test_what_is_replaced_is_given_back() -> None:
    trainer, module, replaced = pl.Trainer(accelerator="cpu", logger=False), Skips(), Replaced()
    told = SimpleNamespace(skips=False, sigterm_received=False)
    owners = [trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.validate_loop]
    owners += [trainer.fit_loop.epoch_loop.val_loop, trainer.test_loop, trainer.predict_loop, module]
    before = [{*vars(owner)} for owner in owners]
    refuse_stop_iteration(replaced, trainer)
    take_over_sigterm(replaced, trainer, told)
    hear_skips(replaced, module, told)
    for owner, name in ((trainer.fit_loop.epoch_loop, "on_run_start"), (trainer.fit_loop, "on_advance_end")):
        replaced.watch(owner, name, after=lambda: None)
    assert module.on_train_batch_start(None, 0) == -1
    trainer._signal_connector._sigterm_notifier_fn(15, None)
    assert told.skips and told.sigterm_received
    replaced.give_back()
    assert [{*vars(owner)} for owner in owners] == before


def test_a_name_that_lightning_has_no_more_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"This Lightning has no Trainer\._gone, .* install lightning>=2\.6\.6"):
        Replaced().put(pl.Trainer(accelerator="cpu", logger=False), "_gone", print)


def test_properties_are_those_of_lightning_elsewhere() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, max_steps=7)
    take_over_estimate(trainer, lambda: 5.0)
    take_over_bar(trainer, lambda: 3.0)
    assert isinstance(trainer, pl.Trainer) and isinstance(trainer.progress_bar_callback, pl.Callback)
    assert trainer.progress_bar_callback.total_train_batches == 3.0


# Numbers of a round are logged as ``log_dict`` logs them.


class Numbers(pl.LightningModule):
    """Logs a number of its own kind in each of two hooks, twice in an epoch, and a new name in the second epoch."""

    def __init__(self, faster: bool) -> None:
        super().__init__()
        self.weight, self.faster, self.heard = nn.Parameter(torch.ones(1)), faster, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).sum()

    def _log(self, **numbers: float) -> None:
        if self.faster:
            log_numbers(self, numbers)
        else:
            self.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)

    def on_train_start(self) -> None:
        self._log()  # nothing, when nothing is known

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        step = self.global_step
        self._log(**{"round/a": step / 3, "round/b": 1e9 + step}, **({"late": 2.0 * step} if step > 3 else {}))

    def on_train_epoch_end(self) -> None:
        self._log(whole=self.current_epoch + 0.5, other=-1.0)
        self.heard.append(dict(self.trainer.callback_metrics))

    def on_train_epoch_start(self) -> None:
        self.heard.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def heard(module: Numbers) -> tuple[list[Any], dict[str, Tensor]]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader([torch.ones(1)] * 2, batch_size=None))
    return module.heard, dict(trainer.callback_metrics)


def test_means_of_each_epoch_are_those_of_log_dict() -> None:
    (faster, ended), (expected, as_expected) = heard(Numbers(True)), heard(Numbers(False))
    assert faster == expected
    assert ended == as_expected
    assert ended["round/a"] == pytest.approx((5 / 3 + 6 / 3) / 2)
    assert ended["late"] == 11 and ended["whole"] == 2.5
