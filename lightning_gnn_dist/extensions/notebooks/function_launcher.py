"""Starts ranks for a call of the trainer, by ``multiprocessing``, and brings back what has changed in rank 0.

It works in a notebook, and brings back callbacks, loggers and predictions, which Lightning's own launcher of processes
does not. Of a fit that does not come to its end the weights of the last meeting stay.
"""

from __future__ import annotations

import gc
import linecache
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist.extensions.notebooks import by_value
from lightning_gnn_dist.extensions.notebooks.by_value import CannotTravelError
from lightning_gnn_dist.extensions.notebooks.rank_processes import How, InterruptedRankError, RankProcesses, Start
from lightning_gnn_dist.rounds.launching import Elsewhere
from lightning_gnn_dist.rounds.refusals import check_call
from lightning_gnn_dist.wire.addresses import held_port
from lightning_gnn_dist.wire.launching.processes import handling
from lightning_gnn_dist.wire.launching.roll_call import give_key

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


class FunctionLauncher(Elsewhere):
    """Starts all ranks by ``multiprocessing``; this process is no rank, and gets back what rank 0 has at the end.

    Args:
        strategy: The strategy of the trainer here.
        start: How to start them.
    """

    def __init__(self, strategy: DDPStrategy, start: Start) -> None:
        self._strategy, self._start = strategy, start
        self._ranks: RankProcesses | None = None
        self._on_sigint: Any = signal.default_int_handler
        self._aside: tuple[Any, list[Callback]] | None = None  # a trainer's callbacks while it tells of an exception

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        check_call(trainer, args)
        if self._start == "fork":
            rank_zero_info("start_method='fork': torch computes with one thread in each rank; others have no limit.")
        work = RankWork(function, args, kwargs, trainer, self._start)
        self._on_sigint = signal.getsignal(signal.SIGINT)
        try:
            with self._sigterm_passed_on(), held_port() as port:
                variables = self._environment(port)
                self._ranks = ranks = RankProcesses(work, self._strategy.num_processes, self._start, variables)
                error = ranks.run()
        except CannotTravelError as untold:
            raise work.explained(untold) from untold
        finally:
            self._ranks = None
        results = [ranks.outcomes[rank].result or (None, None) for rank in sorted(ranks.outcomes)]
        kept = results[0][1] if results else None
        if kept is not None:
            kept.give_to(trainer, work.shared())
        left = any(outcome.how == "left" for outcome in ranks.outcomes.values())
        failure = KeyboardInterrupt(_left_behind(trainer, kept)) if ranks.was_interrupted else error
        if failure is not None or left:
            self._aside, trainer.callbacks = (trainer, trainer.callbacks), []  # theirs have heard of it: in the ranks
            raise failure or SIGTERMException
        return _joined([returned for returned, _ in results], trainer.state.fn)

    def kill(self, signum: int) -> None:
        if self._ranks is not None:
            self._ranks.kill(signum)

    def on_exception(self, exception: BaseException) -> None:
        """Let an interrupt end the cell or the prompt's command. Lightning would end the process, and with it both."""
        if self._aside is not None:
            trainer, callbacks = self._aside
            trainer.callbacks, self._aside = callbacks, None
        if isinstance(exception, KeyboardInterrupt):
            signal.signal(signal.SIGINT, self._on_sigint)  # Lightning has turned it off
            raise KeyboardInterrupt(*exception.args) from None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ranks": None, "_on_sigint": None}

    def _environment(self, port: int) -> dict[str, str]:
        """Return the variables for the ranks. Those of this process stay as they are, for the next fit."""
        variables = {"MASTER_PORT": str(port), **os.environ}
        if self._strategy.num_nodes == 1:
            give_key(variables)
        elif (environment := self._strategy.cluster_environment) is not None:
            variables["MASTER_PORT"] = str(environment.main_port)
        return variables

    @contextmanager
    def _sigterm_passed_on(self) -> Iterator[None]:
        """SIGTERM stops the ranks as if each had received it; a second one ends this process, and them with it."""
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not is_free or threading.current_thread() is not threading.main_thread():
            yield
            return

        with handling(self._pass_on, signal.SIGTERM):
            yield

    def _pass_on(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.kill(number)


def _joined(returned: list[Any], fn: TrainerFn) -> Any:
    """Return what all ranks have predicted, as one process would, or what rank 0 says of its work."""
    if fn != TrainerFn.PREDICTING or returned[0] is None:
        return returned[0]
    of_loaders = [[*chain.from_iterable(parts)] for parts in zip(*returned, strict=True)]
    return of_loaders if len(of_loaders) > 1 else of_loaders[0]


def _left_behind(trainer: Any, kept: Kept | None) -> str:
    """Return what an interrupt has left of a fit."""
    if trainer.state.fn != TrainerFn.FITTING:
        return "All ranks have ended."
    if kept is None or kept.weights is None:
        return "All ranks have ended, rank 0 without its weights: the model is what it was before the fit."
    rounds = getattr(trainer.strategy, "state", None)
    when = f"their last meeting, that of round {rounds.round_idx}" if rounds is not None else "the last whole step"
    return f"All ranks have ended. The model has the weights of {when}."


class ProcessSettings:
    """What users set for a process, and ranks that are fresh processes take on.

    Random states, defaults of torch, filters of warnings, levels of loggers, and the cells of a notebook.
    """

    def __init__(self) -> None:
        self._snapshot = _GlobalStateSnapshot.capture()
        self._dtype, self._precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        self._filters = list(warnings.filters)
        loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
        self._levels = {each.name: each.level for each in loggers if each.level}
        self._cells = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}

    def take_on(self) -> None:
        """Make them those of the process that calls this."""
        self._snapshot.restore()
        torch.set_default_dtype(self._dtype)
        torch.set_float32_matmul_precision(self._precision)
        warnings.resetwarnings()
        warnings.filters.extend(self._filters)  # type: ignore[attr-defined]
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        linecache.cache.update(self._cells)  # a traceback then shows the lines of a notebook


@dataclass
class RankWork:
    """One call of the trainer (fit, validate, test, predict), as each rank does it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    trainer: Any
    start: Start
    settings: ProcessSettings = field(default_factory=ProcessSettings)
    keeper: Keeper = field(default_factory=Keeper)
    returned: Any = None
    before: set[str] = field(default_factory=set)  # layers of the module
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
        self.before = {*layers_of(self.trainer.strategy._lightning_module)}
        self.trainer.callbacks.append(self.keeper)
        try:
            self.returned = call._call_and_handle_interrupt(self.trainer, self._call, *self.args, **self.kwargs)
        except SIGTERMException:
            return "left"
        return "done"

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.function(*args, **kwargs)
        except BaseException as error:
            self.failure = error, time.monotonic()
            raise

    def result(self) -> tuple[Any, Kept | None]:
        """Return what Lightning's function returned, predictions by loader, and, of local rank 0, what changed."""
        kept, returned = None, move_data_to_device(self.returned, "cpu")
        if os.environ["LOCAL_RANK"] == "0":
            kept = Kept(self.trainer, self.shared(), self.before, self.keeper)
        is_of_one = self.trainer.state.fn == TrainerFn.PREDICTING and len(self.trainer.predict_loop.max_batches) == 1
        return [returned] if is_of_one and returned is not None else returned, kept

    def on_interrupt(self) -> None:
        self.keeper.is_interrupted = True
        if not self.keeper.waits_for_step:
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
