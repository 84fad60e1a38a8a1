"""What stays of a call of the trainer: the weights of the last meeting, and what has changed in rank 0."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnn_dist.extensions.notebooks.rank_processes import InterruptedRankError
from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.by_value import CannotTravelError

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class Keeper(Callback):
    """Keeps the weights of the last meeting, on local rank 0, for the case that the round does not come to its end."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self.waits_for_step = False  # gradients are exchanged: only whole steps leave all ranks alike
        self._round: int | None = -1  # the one whose start the weights are of
        self._weights: dict[str, Any] = {}

    def weights(self, trainer: Trainer) -> dict[str, Any]:
        """Return the weights of the last meeting, or for a strategy without meetings those of now."""
        state = getattr(trainer.strategy, "state", None)
        if state is not None and self._round == state.round_idx:
            return self._weights
        return trainer.lightning_module.state_dict()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.is_interrupted:
            raise InterruptedRankError
        state = getattr(trainer.strategy, "state", None)  # of rounds
        self.waits_for_step = state is None
        if state is not None and self._round != state.round_idx and os.environ["LOCAL_RANK"] == "0":
            self._round = state.round_idx
            self._weights = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in pl_module.state_dict().items()
            }

    def on_validation_batch_start(self, *args: Any) -> None:
        self.waits_for_step = False
        if self.is_interrupted:  # where Python threw the exception of the signal's handler away, as in a destructor
            raise InterruptedRankError

    on_test_batch_start = on_predict_batch_start = on_train_end = on_validation_batch_start  # type: ignore[assignment]


def layers_of(module: LightningModule) -> dict[str, Any]:
    """Return the layers and parameters of a module."""
    return {**module._modules, **module._parameters}


class Kept:
    """What a fit has changed, on its way from rank 0 to the process that started it.

    Args:
        trainer: That of the rank.
        shared: What both processes have.
        before: The layers of the module before the call.
        keeper: Has the weights.
    """

    def __init__(self, trainer: Trainer, shared: Sequence[object], before: Collection[str], keeper: Keeper) -> None:
        module = trainer.lightning_module
        self.weights: dict[str, Any] | None = None
        # Of what no rank holds whole there is nothing here, as the fit was interrupted.
        if trainer.state.fn == TrainerFn.FITTING and not trainer.strategy.excluded:  # type: ignore[attr-defined]
            self.weights = move_data_to_device(keeper.weights(trainer), "cpu")
        made = {name: each for name, each in layers_of(module).items() if name not in before}
        self.added = {} if self.weights is None else made  # by configure_model or setup
        self.state, self.rounds = trainer.state, getattr(trainer.strategy, "state", None)
        # Those that callbacks, loggers and the progress bar see.
        self.metrics = move_data_to_device({name: dict(getattr(trainer, name)) for name in _METRICS}, "cpu")
        fit_loop = trainer.fit_loop
        counts = {name: each for name, each in fit_loop.state_dict().items() if not name.endswith("state_dict")}
        self.loops = counts, fit_loop.epoch_loop._batches_that_stepped, trainer.should_stop
        self.attributes = [_attributes(owner, shared) for owner in _given_back(shared)]

    def give_to(self, trainer: Any, shared: Sequence[object]) -> None:
        """Change the objects here as those of rank 0 were changed."""
        module = trainer.lightning_module
        if self.weights is not None:
            for name, layer in self.added.items():
                setattr(module, name, layer)
            named = chain(module.named_parameters(), module.named_buffers())
            if any(value.dtype != self.weights.get(name, value).dtype for name, value in named):
                trainer.strategy.precision_plugin.convert_module(module)  # as the ranks did: 64-true
            module.load_state_dict(self.weights, strict=False)  # a hook may have added buffers
        trainer.state = self.state
        for name, metrics in self.metrics.items():
            setattr(trainer._logger_connector, f"_{name}", metrics)
        # As far as rank 0, without taking a next fit for one that is resumed.
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        counts, epoch_loop._batches_that_stepped, trainer.should_stop = self.loops
        fit_loop.load_state_dict(counts)
        for loop in (fit_loop, epoch_loop, *(inner for inner in vars(epoch_loop).values() if isinstance(inner, _Loop))):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        if self.rounds is not None:
            trainer.strategy.state = self.rounds
        for owner, attributes in zip(_given_back(shared), self.attributes, strict=True):
            for name, octets in attributes.items():
                vars(owner)[name] = by_value.from_bytes(octets, shared)


def _given_back(shared: Sequence[object]) -> list[Any]:
    """Return the module, the callbacks, but for progress bars, and the loggers."""
    kinds = LightningModule | Callback | Logger
    return [item for item in shared if isinstance(item, kinds) and not isinstance(item, ProgressBar)]


def _attributes(owner: Any, shared: Sequence[object]) -> dict[str, bytes]:
    """Return those that can travel; of a module what it has noted: a rate that a search has set, losses."""
    noted = owner.__getstate__()
    if isinstance(owner, LightningModule):
        names = [name for name in vars(owner) if name == "_hparams" or (name[0] != "_" and name != "training")]
        noted = {name: vars(owner)[name] for name in names if _is_note(vars(owner)[name])}
    found = {}
    for name, value in noted.items():
        with suppress(CannotTravelError):  # files, as of a logger: they stay with the rank
            found[name] = by_value.as_bytes(value, shared)
    return found


def _is_note(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_note(item) for item in chain(value, value.values()))
    if isinstance(value, list | tuple | set):
        return all(_is_note(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
