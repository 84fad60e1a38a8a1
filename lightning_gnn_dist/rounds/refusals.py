"""What strategies refuse, each with the way out. A refusal at the start beats a hang in the night."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, Timer, WeightAveraging
from lightning.pytorch.utilities import CombinedLoader

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.joint import ChecksEarly, GivesBatches
from lightning_gnn_dist.rounds.correction_gradients import name_of_step
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of

OTHER_SPARSE = (
    "A parameter{} has a sparse gradient, and is no table that ranks know: look rows up in an "
    "nn.Embedding(..., sparse=True), or with sparse=False."
)


def check_says(name: str, value: object, method: str, text: str) -> None:
    """Refuse a value without a method that strategies call; None says nothing, and is the default."""
    if value is not None and (isinstance(value, type) or not callable(getattr(value, method, None))):
        raise TypeError(f"{name} must say {text}got {shown(value)}.")


def check_reducer(reducer: object) -> None:
    """Refuse what does not say how means are sent."""
    check_says("reducer", reducer, "of_rounds", "how means are sent, as Rounded(8) does, or be None: as they are; ")


def refuse_all(premise: str, reasons: Iterable[str]) -> None:
    """Refuse all that applies, in one sentence each."""
    if found := " ".join(reasons):
        raise ValueError(f"{premise} {found}")


def check_call(trainer: Any, arguments: Sequence[object]) -> None:
    """Refuse what a call of the trainer was given, before ranks are started for it, as far as this process can see.

    Args:
        trainer: The trainer.
        arguments: Those of the call: the module, loaders or a data module, the path of a checkpoint.
    """
    for given in arguments[1:]:
        if isinstance(given, ChecksEarly):
            given.check_before_ranks(trainer, arguments[0])
        elif given is not None and not isinstance(given, LightningDataModule):
            for loader in CombinedLoader(given).flattened:
                check_loader(type(trainer.strategy).__name__, loader)


def check_loader(strategy: str, loader: object) -> None:
    """Refuse a loader of PyG: of its batches no rank would know which nodes are its own, or are learned."""
    if kind := next((each for each in type(loader).__mro__ if each.__module__.startswith("torch_geometric.")), None):
        raise ValueError(
            f"{strategy} takes batches from a data module, which gives each rank its part of the graph, and this is a "
            f"{kind.__name__} of torch_geometric: use PartitionedDataModule(data, sampler=NeighborSampler([15, 10]), "
            "batch_size=...), or LinkDataModule; for many small graphs leave the strategy out."
        )


def refuse_estimate(clock: Any, why: str) -> NoReturn:
    """Refuse to estimate a number of steps that cannot be known, for the reason ``why``."""
    raise ValueError(
        f"trainer.estimated_stepping_batches cannot be known with {clock}: {why}. Schedule by rounds, whose number is "
        'known: {"scheduler": ..., "interval": "epoch"} over trainer.max_epochs steps of the scheduler. Or let rounds '
        "end after as many steps on all ranks, as with EverySteps(16)."
    )


def check_ranks_of_loader(loader: Any, world_size: int) -> None:
    """Refuse a loader made for another number of ranks, such as one that gives each rank the whole graph."""
    made_for = getattr(loader, "num_ranks", world_size)  # another's does not say
    if made_for != world_size:
        raise ValueError(
            f"The training loader was made for {made_for} rank, and {world_size} train: hand the data module itself to "
            "the trainer, trainer.fit(model, datamodule), so that it can give each rank its part."
        )


def refuse_weights(loader: object) -> NoReturn:
    """Refuse to weigh by the training nodes (or edges) of a rank, which its loader does not know."""
    raise ValueError(
        'weights="nodes" needs a training loader that knows its num_seeds, as PartitionedDataModule gives; '
        f'{type(loader).__name__} does not: use weights="uniform".'
    )


def require_batches(trainer: Any, name: str, what: str) -> GivesBatches:
    """Return the data module; refuse one without a method of this name, and a module without a step to call."""
    data: GivesBatches = datamodule_of(trainer)
    if not hasattr(data, name):
        raise ValueError(
            f"{what} needs a data module with {name}(round_idx), as PartitionedDataModule has; this fit has "
            f"{type(data).__name__}: use trainer.fit(model, PartitionedDataModule(...))."
        )
    require_step(trainer.lightning_module)
    return data


def require_step(module: Any) -> None:
    """Refuse a module without a step that returns a loss and takes no optimizer step itself."""
    has_own_step = name_of_step(module) == "correction_step"
    if not module.automatic_optimization and not has_own_step:
        raise ValueError(
            "With manual optimisation training_step() takes steps itself, so gradients for corrections cannot come "
            "from it: define correction_step(batch), which returns the mean loss over the seeds."
        )
    own = getattr(module, "correction_step", None)
    if has_own_step:
        try:
            inspect.signature(module.correction_step).bind("batch")
        except TypeError as error:
            raise TypeError(f"correction_step(batch) is called with the batch alone: {error}.") from error
        return
    # One that is no method or is misspelt would be ignored in silence.
    if own is not None:
        raise TypeError(f"correction_step must be a method of the module, correction_step(batch), got {shown(own)}.")
    methods = [name for level in type(module).__mro__ for name, value in vars(level).items() if callable(value)]
    known = {name for name in methods if not name.startswith("_") and not hasattr(LightningModule, name)}
    if near := get_close_matches("correction_step", known, n=1, cutoff=0.9):
        raise ValueError(f"The module has a method {near[0]}, and corrections call correction_step(batch): rename it.")


def check_sizes(sizes: list[int]) -> None:
    """Refuse to average unequal sizes. All ranks see the same sizes, so all of them raise or none."""
    if len(set(sizes)) > 1:
        raise RuntimeError(
            f"The ranks are about to average different numbers of values: {sizes}, in order of rank. An optimizer has "
            "no state yet, or a parameter is frozen where gradients are averaged too, on some ranks only."
        )


def check_trainer(strategy: str, trainer: Any, *, has_layer_sync: bool) -> None:
    """Refuse settings of the Trainer that act inside a round, where every rank is alone."""
    premise = f"{strategy} trains in rounds, one epoch each, and ranks are alone between meetings."
    refuse_all(premise, _against_rounds(trainer, has_layer_sync))


def _against_rounds(trainer: Any, has_layer_sync: bool) -> Iterator[str]:
    dry_run = bool(trainer.fast_dev_run)  # sets max_steps itself, alike on all ranks
    if has_layer_sync:
        yield "sync_batchnorm=True talks to the other ranks in every forward: leave it out."
    if trainer.max_steps != -1 and not dry_run:
        yield f"max_steps={trainer.max_steps} ends the fit inside a round: use max_epochs, which counts rounds."
    if (limit := trainer.limit_train_batches) != 1.0 and not dry_run:
        yield f"limit_train_batches={limit} cuts rounds short: shorten them instead, as with EverySteps(10)."
    # For an interval in time, such as "00:05:00", Lightning sets another attribute than val_check_interval.
    if getattr(trainer, "val_check_interval", None) != 1.0 or trainer.check_val_every_n_epoch is None:
        yield "val_check_interval validates inside a round, where replicas differ: use check_val_every_n_epoch."
    if trainer.reload_dataloaders_every_n_epochs != 0:
        yield "reload_dataloaders_every_n_epochs restarts the stream of batches: leave it out."
    if trainer.overfit_batches != 0:
        yield "overfit_batches is meant for one process: leave the strategy out to overfit."
    for callback in trainer.callbacks:
        is_saver = isinstance(callback, ModelCheckpoint)
        if is_saver and (callback._every_n_train_steps or callback._train_time_interval is not None):
            yield (
                "ModelCheckpoint by steps or time would save one rank's replica: use every_n_epochs, which counts "
                "rounds."
            )
        if isinstance(callback, WeightAveraging):
            base = EMAWeightAveraging if isinstance(callback, EMAWeightAveraging) else WeightAveraging
            names = ("on_train_batch_end", "should_update")
            if all(getattr(type(callback), name) is getattr(base, name) for name in names):
                yield (
                    f"{base.__name__} by steps averages another model on every rank: use AveragedRounds() of "
                    "lightning_gnn_dist.callbacks.averaged_rounds, which averages after meetings."
                )
        if isinstance(callback, Timer) and callback._interval == "step":
            yield 'max_time stops ranks by their own clocks: use Timer(duration, interval="epoch") as a callback.'
