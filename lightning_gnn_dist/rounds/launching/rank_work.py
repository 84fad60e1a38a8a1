"""One call of a trainer, as each rank does it, and what comes back from it."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist.rounds.launching.settings import Settings
from lightning_gnn_dist.rounds.lightning_internals import (
    load_loop_state,
    loop_state,
    metrics_of,
    set_metrics,
    show_one_bar,
)
from lightning_gnn_dist.rounds.rows.owned_embedding import owned_tables, rows_here_alone
from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.by_value import CannotTravelError
from lightning_gnn_dist.wire.launching.rank_processes import How, InterruptedRankError, Start


@dataclass
class RankWork:
    """One call of the trainer (fit, validate, test, predict), as each rank does it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Any
    start: Start
    settings: Settings = field(default_factory=Settings)
    keeper: Keeper = field(default_factory=lambda: Keeper())
    returned: Any = None
    known: set[str] = field(default_factory=set)  # the names of the weights at the start
    noted: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # the module's tensors at the start: _versions
    failure: tuple[BaseException, float] | None = None
    _shared: list[Any] = field(default_factory=list)

    def shared(self) -> Sequence[object]:
        if not self._shared:
            trainer, given = self.trainer, (*self.args, *self.kwargs.values())
            module, data = trainer.strategy._lightning_module, [d for d in given if isinstance(d, LightningDataModule)]
            self._shared = [trainer, trainer.strategy, module, *data, *trainer.callbacks, *trainer.loggers]
        return self._shared

    def run(self) -> How:
        gc.freeze()  # else the first collection walks through all that was imported, which takes .3 s on each rank
        if self.start == "fork":
            # The threads of OpenMP stay behind in a fork: a second one would be waited for, for ever.
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning sets another number
        else:
            self.settings.take_on()
        _set_num_threads_if_needed(self.trainer.strategy.num_processes)
        self.trainer.strategy._launcher = None
        with rows_here_alone():
            self.known = {*self.trainer.strategy._lightning_module.state_dict()}
        self.noted = _versions(self.trainer.strategy._lightning_module)
        self.trainer.callbacks.append(self.keeper)
        if not sys.stdout.isatty():
            show_one_bar(self.trainer)
        try:
            self.returned = call._call_and_handle_interrupt(self.trainer, self._noted, *self.args, **self.kwargs)
        except SIGTERMException:
            return "left"
        return "done"

    def _noted(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except BaseException as error:
            self.failure = error, time.monotonic()
            raise

    def result(self, how: How) -> RankResult:
        kept = Kept.of(self) if os.environ["LOCAL_RANK"] == "0" else None
        num_loaders = len(self.trainer.predict_loop.max_batches)
        return RankResult(move_data_to_device(self.returned, "cpu"), num_loaders, kept)

    def has_left_alone(self, name: str, module: LightningModule) -> bool:
        """Whether an attribute of the module is the tensor that it was at the start, with nothing written into it."""
        tensor, version = self.noted.get(name, (None, 0))
        return tensor is not None and vars(module)[name] is tensor and tensor._version == version

    def on_interrupt(self) -> None:
        self.keeper.is_told = True
        if not self.keeper.is_in_step:
            raise InterruptedRankError

    def explained(self, error: CannotTravelError) -> TypeError:
        """Return an error that names the model, data module, callback or logger that cannot travel."""
        shared = self.shared()
        for part in shared[2:]:
            try:
                by_value.check(part, [item for item in shared if item is not part])
            except CannotTravelError as culprit:
                error = culprit
                break
        return TypeError(
            f"{error}. Ranks are processes of their own, and get the model, the data module, callbacks, loggers and "
            "all that these refer to by value. Make files, locks, connections and the like in setup(), which each rank "
            "calls."
        )


class Keeper(Callback):
    """Keeps the weights of the last meeting, on local rank 0, for the case that the round does not come to its end."""

    def __init__(self) -> None:
        self.is_told = self.is_in_step = False
        self._round: int | None = -1  # the one whose start the weights are of
        self._weights: dict[str, Any] = {}

    def weights(self, trainer: Trainer) -> dict[str, Any]:
        """Return the weights of the last meeting, or for a strategy without meetings those of now."""
        if self._round == _round_of(trainer):
            return self._weights
        return trainer.lightning_module.state_dict()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._look()
        is_alone: bool = trainer.strategy.is_alone  # type: ignore[attr-defined]
        self.is_in_step = not is_alone  # gradients are exchanged: only whole steps leave all ranks alike
        is_new_round = is_alone and self._round != _round_of(trainer)
        # Of a table that no rank holds whole there is nothing to keep that a rank has the memory for.
        if is_new_round and os.environ["LOCAL_RANK"] == "0" and not trainer.strategy.ownership.tables:  # type: ignore[attr-defined]
            self._weights = {name: _copied(value) for name, value in pl_module.state_dict().items()}
            self._round = _round_of(trainer)

    def on_train_batch_end(self, *args: Any) -> None:
        self.is_in_step = False
        self._look()

    def on_validation_batch_start(self, *args: Any) -> None:
        self._look()

    def on_test_batch_start(self, *args: Any) -> None:
        self._look()

    def on_predict_batch_start(self, *args: Any) -> None:
        self._look()

    def _look(self) -> None:
        if self.is_told:  # where Python threw the exception of the signal's handler away, as in a destructor
            raise InterruptedRankError


@dataclass
class RankResult:
    """What a rank gives back: what Lightning's function returned, and, local rank 0, what the trainer here takes."""

    returned: Any
    num_loaders: int
    kept: Kept | None


@dataclass
class Kept:
    """What a fit has changed, on its way from rank 0 to the process that started it."""

    weights: dict[str, Any] | None
    added: dict[str, Any]  # layers that configure_model or setup made, and parameters
    state: Any
    metrics: Sequence[dict[str, Any]]
    loops: dict[str, Any]
    rounds: Any
    attributes: list[dict[str, bytes]]  # of the module, and each callback and logger: those that can travel

    @classmethod
    def of(cls, work: RankWork) -> Kept:
        trainer, weights, module = work.trainer, None, work.trainer.lightning_module
        is_whole = all(table.owners is None for table in owned_tables(module).values())  # else it was interrupted
        if trainer.state.fn == TrainerFn.FITTING and is_whole:
            weights = work.keeper.weights(trainer)
        made = {name.split(".")[0] for name in (weights or {}).keys() - work.known}
        return cls(
            move_data_to_device(weights, "cpu"),
            {name: getattr(module, name) for name in made if name in {**module._modules, **module._parameters}},
            trainer.state,
            move_data_to_device(metrics_of(trainer), "cpu"),
            loop_state(trainer),
            getattr(trainer.strategy, "state", None),
            [_attributes(owner, work) for owner in _owners(work.shared())],
        )

    def give_to(self, work: RankWork) -> None:
        """Change the objects here as those of rank 0 were changed."""
        trainer = work.trainer
        if self.weights is not None:
            for name, layer in self.added.items():
                setattr(trainer.lightning_module, name, layer)
            if any(value.dtype != self.weights.get(name, value).dtype for name, value in _weights(trainer)):
                trainer.strategy.precision_plugin.convert_module(trainer.lightning_module)  # as the ranks did: 64-true
            trainer.lightning_module.load_state_dict(self.weights, strict=False)  # a hook may have added buffers
        trainer.state = self.state
        set_metrics(trainer, self.metrics)
        load_loop_state(trainer, self.loops)
        if self.rounds is not None:
            trainer.strategy.state = self.rounds
        for owner, attributes in zip(_owners(work.shared()), self.attributes, strict=True):
            for name, octets in attributes.items():
                vars(owner)[name] = by_value.from_bytes(octets, work.shared())


def _owners(shared: Sequence[object]) -> list[Any]:
    """Return the module, the callbacks, but for progress bars, and the loggers."""
    kinds = LightningModule | Callback | Logger
    return [item for item in shared if isinstance(item, kinds) and not isinstance(item, ProgressBar)]


def _weights(trainer: Trainer) -> Iterable[tuple[str, Tensor]]:
    return chain(trainer.lightning_module.named_parameters(), trainer.lightning_module.named_buffers())


def _attributes(owner: Any, work: RankWork) -> dict[str, bytes]:
    found = {}
    for name, value in (_notes(owner, work) if isinstance(owner, LightningModule) else owner.__getstate__()).items():
        with suppress(CannotTravelError):  # files, as of a logger: they stay with the rank
            found[name] = by_value.as_bytes(value, work.shared())
    return found


def _notes(module: LightningModule, work: RankWork) -> dict[str, Any]:
    """Return what a module has noted: a rate that a search has set, losses. Its weights come back by themselves."""
    weights = {_place(tensor) for tensor in chain(module.parameters(), module.buffers())}
    names = [name for name in vars(module) if name == "_hparams" or (not name.startswith("_") and name != "training")]
    noted = {name: vars(module)[name] for name in names if not work.has_left_alone(name, module)}
    return {
        name: value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in noted.items()
        if _is_note(value, weights)
    }


def _versions(module: LightningModule) -> dict[str, tuple[Tensor, int]]:
    """Return the tensors that are plain attributes of a module, each with torch's count of what was written into it."""
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: (value, value._version) for name, value in tensors.items() if not value.is_inference()}


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


def _round_of(trainer: Trainer) -> int | None:
    """Return how many meetings a strategy that holds some has held."""
    state = getattr(trainer.strategy, "state", None)
    return None if state is None else int(state.round_idx)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
