"""What a strategy of rounds refuses, each with the way out. A refusal at the start beats a hang in the night."""

from __future__ import annotations

from typing import Any, get_args

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer


def check_choice(name: str, value: Any, choices: Any) -> None:
    """``choices`` is a ``Literal``, or one with ``None``."""
    allowed = [choice for option in get_args(choices) for choice in get_args(option) or [option]]
    allowed = [None if choice is type(None) else choice for choice in allowed]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}.")


def check_at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_clock(clock: Any) -> None:
    if clock is not None and not callable(getattr(clock, "is_over", None)):
        raise TypeError(f"clock must say when a round is over, as EverySteps(16) or EveryPass() do, got {clock!r}.")


def check_trainer(strategy: str, trainer: Trainer, *, has_layer_sync: bool) -> None:
    """Refuse the Trainer's settings that act in mid-round, where every rank is alone."""
    found = [reason for applies, reason in _conflicts(trainer, has_layer_sync) if applies]
    if found:
        raise ValueError(
            f"{strategy} trains in rounds, one epoch each, and ranks are alone between meetings. " + " ".join(found)
        )


def require_num_seeds(loader: Any) -> int:
    """The training nodes of this rank, as the data module's loader knows them."""
    num_seeds: int | None = getattr(loader, "num_seeds", None)
    if num_seeds is None:
        raise ValueError(
            'weights="nodes" needs a training loader that knows its num_seeds, as PartitionedDataModule gives; '
            f'{type(loader).__name__} does not: use weights="uniform".'
        )
    return num_seeds


def require_batches(trainer: Any, name: str, what: str) -> None:
    """The data module must give batches for gradients outside the loop."""
    if not hasattr(trainer.datamodule, name):
        raise ValueError(
            f"{what} needs a data module with {name}(round_idx), as PartitionedDataModule has; this fit has "
            f"{type(trainer.datamodule).__name__}: use trainer.fit(model, PartitionedDataModule(...))."
        )


def check_replicas(checksums: list[int], round_idx: int) -> None:
    """All ranks see the same checksums, so all of them raise or none."""
    if len(set(checksums)) > 1:
        odd = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        raise RuntimeError(
            f"After the meeting of round {round_idx} the replicas of ranks {odd} differ from that of rank 0. Something "
            "changes weights on some ranks only: a callback at the end of a batch, or a parameter frozen on one rank."
        )


def _conflicts(trainer: Any, has_layer_sync: bool) -> list[tuple[bool, str]]:
    dry_run = bool(trainer.fast_dev_run)  # sets max_steps itself, alike on all ranks
    return [
        (has_layer_sync, "sync_batchnorm=True talks to the other ranks in every forward: leave it out."),
        (
            trainer.max_steps != -1 and not dry_run,
            f"max_steps={trainer.max_steps} ends the fit inside a round: use max_epochs, which counts rounds.",
        ),
        (
            trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch is None,
            "val_check_interval validates inside a round, where replicas differ: use check_val_every_n_epoch.",
        ),
        (
            trainer.reload_dataloaders_every_n_epochs != 0,
            "reload_dataloaders_every_n_epochs restarts the stream of batches: leave it out.",
        ),
        (
            trainer.overfit_batches != 0,
            "overfit_batches is meant for one process: leave the strategy out to overfit.",
        ),
        *_callback_conflicts(trainer),
    ]


def _callback_conflicts(trainer: Any) -> list[tuple[bool, str]]:
    conflicts = []
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):
            by_step = bool(callback._every_n_train_steps) or callback._train_time_interval is not None
            reason = (
                "ModelCheckpoint by steps or time would save one rank's replica: use "
                "every_n_epochs, which counts rounds."
            )
            conflicts.append((by_step, reason))
        if isinstance(callback, Timer):
            reason = 'max_time stops ranks by their own clocks: use Timer(duration, interval="epoch") as a callback.'
            conflicts.append((callback._interval == "step", reason))
    return conflicts
