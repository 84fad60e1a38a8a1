"""What is replaced of Lightning is there, says so where it is not, and is given back."""

import lightning.pytorch as pl
import pytest

from lightning_gnn_dist.rounds.lightning_internals import (
    Replaced,
    hear_skips,
    refuse_stop_iteration,
    take_over_bar,
    take_over_estimate,
    take_over_sigterm,
)


class Skips(pl.LightningModule):
    """Leaves every epoch."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> int:
        return -1


def test_what_is_replaced_is_given_back() -> None:
    trainer, module, heard, replaced = pl.Trainer(accelerator="cpu", logger=False), Skips(), [], Replaced()
    owners = [trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.validate_loop]
    owners += [trainer.fit_loop.epoch_loop.val_loop, trainer.test_loop, trainer.predict_loop, module]
    before = [{*vars(owner)} for owner in owners]
    refuse_stop_iteration(replaced, trainer)
    take_over_sigterm(replaced, trainer, lambda: heard.append("told"))
    hear_skips(replaced, module, heard.append)
    for owner, name in ((trainer.fit_loop.epoch_loop, "on_run_start"), (trainer.fit_loop, "on_advance_end")):
        replaced.watch(owner, name, after=lambda: None)
    assert module.on_train_batch_start(None, 0) == -1
    trainer._signal_connector._sigterm_notifier_fn(15, None)
    assert heard == [True, "told"]
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
