"""One call of a trainer, as each rank does it, and what comes back from it."""

from __future__ import annotations

import gc
import linecache
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.extensions.notebooks.kept import AtStart, Keeper, Kept
from lightning_gnn_dist.extensions.notebooks.rank_life import How, InterruptedRankError
from lightning_gnn_dist.extensions.notebooks.rank_processes import Start
from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.by_value import CannotTravelError


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
    at_start: AtStart = field(default_factory=AtStart)
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
        self.at_start = AtStart.of(self.trainer.strategy._lightning_module)
        self.trainer.callbacks.append(self.keeper)
        if not sys.stdout.isatty():
            _show_one_bar(self.trainer)
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

    def result(self, how: How) -> RankResult:
        kept = None
        if os.environ["LOCAL_RANK"] == "0":
            kept = Kept.of(self.trainer, self.shared(), self.at_start, self.keeper.weights)
        num_loaders = len(self.trainer.predict_loop.max_batches)
        return RankResult(move_data_to_device(self.returned, "cpu"), num_loaders, kept)

    def on_interrupt(self) -> None:
        self.keeper.is_interrupted = True
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


@dataclass
class RankResult:
    """What a rank gives back: what Lightning's function returned, and, local rank 0, what the trainer here takes."""

    returned: Any
    num_loaders: int
    kept: Kept | None


def _show_one_bar(trainer: Trainer) -> None:
    """Show no bar for a validation below that of the fit: where text is all that can be shown, both take many lines."""
    bar: Any = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        draw = bar.init_validation_tqdm
        is_fit = trainer.state.fn == TrainerFn.FITTING
        bar.init_validation_tqdm = lambda: Tqdm(disable=True) if is_fit else draw()  # type: ignore[method-assign]
