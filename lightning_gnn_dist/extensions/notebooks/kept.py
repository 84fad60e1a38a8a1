"""What stays of a call of the trainer: the weights of the last meeting, and what has changed in rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnn_dist.extensions.notebooks.rank_processes import InterruptedRankError
from lightning_gnn_dist.rounds.own_states import asking_nobody
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
            # Of what no rank holds whole there is nothing to keep that a rank has the memory for.
            whole = {} if trainer.strategy.excluded else pl_module.state_dict()  # type: ignore[attr-defined]
            self._weights = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in whole.items()
            }

    def on_validation_batch_start(self, *args: Any) -> None:
        self.waits_for_step = False
        if self.is_interrupted:  # where Python threw the exception of the signal's handler away, as in a destructor
            raise InterruptedRankError

    on_test_batch_start = on_predict_batch_start = on_train_end = on_validation_batch_start  # type: ignore[assignment]


@dataclass
class AtStart:
    """What the module of a rank has at the start: the names of its weights, and tensors that are plain attributes."""

    weights: set[str] = field(default_factory=set)
    tensors: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # with torch's count of what was written there

    @classmethod
    def of(cls, module: LightningModule) -> AtStart:
        with asking_nobody():
            weights = {*module.state_dict()}
        tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        counted = {name: (value, value._version) for name, value in tensors.items() if not value.is_inference()}
        return cls(weights, counted)

    def is_unchanged(self, name: str, value: object) -> bool:
        """Whether an attribute is the tensor that it was, with nothing written into it."""
        tensor, version = self.tensors.get(name, (None, 0))
        return tensor is not None and value is tensor and tensor._version == version


@dataclass
class Kept:
    """What a fit has changed, on its way from rank 0 to the process that started it."""

    weights: dict[str, Any] | None
    added: dict[str, Any]  # layers that configure_model or setup made, and parameters
    state: Any
    metrics: dict[str, dict[str, Any]]  # those that callbacks, loggers and the progress bar see
    loops: dict[str, Any]
    rounds: Any
    attributes: list[dict[str, bytes]]  # of the module, and each callback and logger: those that can travel

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        shared: Sequence[object],
        at_start: AtStart,
        weights_of: Callable[[Trainer], dict[str, Any]],
    ) -> Kept:
        weights, module = None, trainer.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and not trainer.strategy.excluded:  # type: ignore[attr-defined]  # else it was interrupted
            weights = weights_of(trainer)
        made = {name.split(".")[0] for name in (weights or {}).keys() - at_start.weights}
        return cls(
            move_data_to_device(weights, "cpu"),
            {name: getattr(module, name) for name in made if name in {**module._modules, **module._parameters}},
            trainer.state,
            move_data_to_device({name: dict(getattr(trainer, name)) for name in _METRICS}, "cpu"),
            _loop_state(trainer),
            getattr(trainer.strategy, "state", None),
            [_attributes(owner, shared, at_start) for owner in _given_back(shared)],
        )

    def give_to(self, trainer: Any, shared: Sequence[object]) -> None:
        """Change the objects here as those of rank 0 were changed."""
        if self.weights is not None:
            for name, layer in self.added.items():
                setattr(trainer.lightning_module, name, layer)
            named = chain(trainer.lightning_module.named_parameters(), trainer.lightning_module.named_buffers())
            if any(value.dtype != self.weights.get(name, value).dtype for name, value in named):
                trainer.strategy.precision_plugin.convert_module(trainer.lightning_module)  # as the ranks did: 64-true
            trainer.lightning_module.load_state_dict(self.weights, strict=False)  # a hook may have added buffers
        trainer.state = self.state
        for name, metrics in self.metrics.items():
            setattr(trainer._logger_connector, f"_{name}", metrics)
        _load_loop_state(trainer, self.loops)
        if self.rounds is not None:
            trainer.strategy.state = self.rounds
        for owner, attributes in zip(_given_back(shared), self.attributes, strict=True):
            for name, octets in attributes.items():
                vars(owner)[name] = by_value.from_bytes(octets, shared)


def _given_back(shared: Sequence[object]) -> list[Any]:
    """Return the module, the callbacks, but for progress bars, and the loggers."""
    kinds = LightningModule | Callback | Logger
    return [item for item in shared if isinstance(item, kinds) and not isinstance(item, ProgressBar)]


def _attributes(owner: Any, shared: Sequence[object], at_start: AtStart) -> dict[str, bytes]:
    found, noted = {}, _notes(owner, at_start) if isinstance(owner, LightningModule) else owner.__getstate__()
    for name, value in noted.items():
        with suppress(CannotTravelError):  # files, as of a logger: they stay with the rank
            found[name] = by_value.as_bytes(value, shared)
    return found


def _notes(module: LightningModule, at_start: AtStart) -> dict[str, Any]:
    """Return what a module has noted: a rate that a search has set, losses. Its weights come back by themselves."""
    weights = {_place(tensor) for tensor in chain(module.parameters(), module.buffers())}
    names = [name for name in vars(module) if name == "_hparams" or (not name.startswith("_") and name != "training")]
    noted = {name: vars(module)[name] for name in names if not at_start.is_unchanged(name, vars(module)[name])}
    return {
        name: value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in noted.items()
        if _is_note(value, weights)
    }


def _is_note(value: Any, weights: set[Any]) -> bool:
    if isinstance(value, Tensor):
        return _place(value) not in weights
    if isinstance(value, dict):
        return all(_is_note(item, weights) for item in chain(value, value.values()))
    if isinstance(value, list | tuple | set):
        return all(_is_note(item, weights) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _place(tensor: Tensor) -> object:
    """Return what two tensors share if a change of one changes the other."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _loop_state(trainer: Trainer) -> dict[str, Any]:
    """Return how far the fits of a trainer have come."""
    state = trainer.fit_loop.state_dict()
    counts = {name: content for name, content in state.items() if not name.endswith("state_dict")}
    return {"counts": counts, "logged": trainer.fit_loop.epoch_loop._batches_that_stepped, "stop": trainer.should_stop}


def _load_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Let a trainer be as far as that of :func:`_loop_state`, without taking a next fit for one that is resumed."""
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    fit_loop.load_state_dict(state["counts"])
    for loop in (fit_loop, epoch_loop, *(inner for inner in vars(epoch_loop).values() if isinstance(inner, _Loop))):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    epoch_loop._batches_that_stepped = state["logged"]
    trainer.should_stop = state["stop"]
