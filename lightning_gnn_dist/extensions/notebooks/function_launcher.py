"""Starts ranks for a call of the trainer, by ``multiprocessing``.

It works in a notebook, and brings back callbacks, loggers and predictions, which Lightning's own launcher of processes
does not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.extensions.notebooks.kept import Kept
from lightning_gnn_dist.extensions.notebooks.rank_processes import RankProcesses, Start
from lightning_gnn_dist.extensions.notebooks.rank_work import RankResult, RankWork
from lightning_gnn_dist.rounds.launching.launchers import Elsewhere
from lightning_gnn_dist.rounds.refusals import check_call
from lightning_gnn_dist.wire.addresses import held_port
from lightning_gnn_dist.wire.launching.by_value import CannotTravelError
from lightning_gnn_dist.wire.launching.processes import handling
from lightning_gnn_dist.wire.launching.roll_call import give_key


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
        results = [ranks.outcomes[rank].result for rank in sorted(ranks.outcomes)]
        kept = results[0].kept if results and results[0] is not None else None
        if kept is not None:
            kept.give_to(trainer, work.shared())
        left = any(outcome.how == "left" for outcome in ranks.outcomes.values())
        failure = KeyboardInterrupt(_left_behind(trainer, kept)) if ranks.was_interrupted else error
        if failure is not None or left:
            self._aside, trainer.callbacks = (trainer, trainer.callbacks), []  # theirs have heard of it: in the ranks
            raise failure or SIGTERMException
        return _joined(results, trainer.state.fn)

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

        def pass_on(number: int, frame: Any) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.kill(signal.SIGTERM)

        with handling(pass_on, signal.SIGTERM):
            yield


def _joined(results: list[RankResult], fn: TrainerFn) -> Any:
    """Return what all ranks have predicted, as one process would, or what rank 0 says of its work."""
    first = results[0]
    if fn != TrainerFn.PREDICTING or first.returned is None:
        return first.returned
    if first.num_loaders == 1:
        return [*chain.from_iterable(result.returned for result in results)]
    return [[*chain.from_iterable(parts)] for parts in zip(*(result.returned for result in results), strict=True)]


def _left_behind(trainer: Any, kept: Kept | None) -> str:
    """Return what an interrupt has left of a fit."""
    if trainer.state.fn != TrainerFn.FITTING:
        return "All ranks have ended."
    if kept is None or kept.weights is None:
        return "All ranks have ended, rank 0 without its weights: the model is what it was before the fit."
    rounds = getattr(trainer.strategy, "state", None)
    when = f"their last meeting, that of round {rounds.round_idx}" if rounds is not None else "the last whole step"
    return f"All ranks have ended. The model has the weights of {when}."
