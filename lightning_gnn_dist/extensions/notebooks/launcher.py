"""Forks all ranks for one call of the trainer, and brings back what rank 0 has at the end.

It is Lightning's launcher, of which it uses private names, with what that lacks: a rank that dies is named and not
waited for, none stays behind, callbacks hear of an error in their rank, and Ctrl-C ends the ranks alone.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gnn_dist.rounds.refusals import check_call
from lightning_gnn_dist.wire.addresses import held_port
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, end_all, end_of, tie_to_parent
from lightning_gnn_dist.wire.launching.roll_call import give_key


class RanksInterruptedError(BaseException):
    """Ctrl-C has ended the ranks. To a KeyboardInterrupt Lightning would answer by the end of this process, too."""


class ForkLauncher(_MultiProcessingLauncher):
    """Forks all ranks for one call of the trainer; this process is none of them.

    Weights, metrics and the path of the best checkpoint come back. All else that ranks change stays with them.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        strategy: Any = self._strategy
        check_call(trainer, args)
        self._check_comes_back(trainer, args)
        try:
            with held_port() as port, tempfile.TemporaryDirectory(prefix="ranks-") as folder:
                variables = {"MASTER_PORT": str(port), **os.environ}
                if strategy.num_nodes == 1:  # else other hosts fork ranks of this run, too
                    give_key(variables)
                files = [Path(folder, f"rank-{rank}") for rank in range(strategy.num_processes)]
                output = self._run(files, variables, trainer, lambda: function(*args, **kwargs))
                self._recover_results_in_main_process(output, trainer)
        except BaseException as error:
            strategy._replaced.put(trainer, "callbacks", [])  # those of the ranks have heard of it
            if isinstance(error, KeyboardInterrupt):
                raise RanksInterruptedError("All ranks have ended, and the model is what it was before.") from None
            raise
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        return output.trainer_results

    def _check_comes_back(self, trainer: Any, args: Sequence[Any]) -> None:
        if trainer.state.fn == TrainerFn.PREDICTING and args[3] is not False:
            raise ValueError(
                "Predictions of forked ranks stay with them: write those of all nodes, by PredictionWriter(path) and "
                "trainer.predict(..., return_predictions=False), or predict in this process, by pl.Trainer(devices=1)."
            )
        if any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks):
            raise ValueError("What a Tuner finds in forked ranks stays with them: give it pl.Trainer(devices=1).")
        if trainer.state.fn == TrainerFn.FITTING and self._already_fit:
            raise ValueError(
                "The ranks of the fit before have ended, and their optimizers with them: take another Trainer, which "
                "begins with the weights of the model, or goes on from a checkpoint, fit(..., ckpt_path=...)."
            )

    def _run(self, files: Sequence[Path], *work: Any) -> Any:
        """Return what rank 0 brings back once all ranks have ended; raise the first error of any."""
        fork: Any = multiprocessing.get_context("fork").Process
        self.procs = [fork(target=self._be_rank, args=(rank, file, *work)) for rank, file in enumerate(files)]
        try:
            for process in self.procs:
                process.start()
            while running := [process.sentinel for process in self.procs if process.exitcode is None]:
                wait(running, 1.0)  # a dead rank is not heard of where processes of its own live
                for rank, process in enumerate(self.procs):
                    if process.exitcode is not None and not files[rank].exists():
                        raise RuntimeError(f"Rank {rank} {end_of(process.exitcode)} in the midst of its work.")
                if any(isinstance(outcome, str) for _, outcome in _read(files)):
                    break
        finally:
            self.kill(signal.SIGINT)
            end_all({rank: each for rank, each in enumerate(self.procs) if each.pid is not None}, GRACE_SECONDS)
        _, outcome = min(_read(files), key=itemgetter(0))  # the first error, from which others follow; else rank 0's
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return outcome

    def _be_rank(self, rank: int, file: Path, variables: dict[str, str], trainer: Any, function: Any) -> None:
        """The life of a rank's process."""
        tie_to_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its parent's handlers
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # threads of OpenMP stay behind in a fork, and would be waited for, for ever
        os.environ.update(variables, LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
        gc.freeze()  # else the first collection walks through, and copies, what all ranks share
        tempfile.tempdir = str(file.parent)  # which ends with the ranks
        self._strategy._launcher = None
        at = math.inf
        outcome: Any = None
        try:
            returned = function()
            if rank == 0:  # others may have no whole tables
                outcome = self._collect_rank_zero_results(trainer, returned)
        except BaseException as error:
            at = time.monotonic()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                call._interrupt(trainer, error)  # which may find better words for it
                trainer._teardown()
            finally:
                told = "".join(traceback.format_exception(error))
                outcome = f"Rank {rank}: {type(error).__name__}: {error}\n\n{told}"
        finally:
            draft = file.with_suffix(".draft")
            draft.write_bytes(pickle.dumps((at, outcome)))
            draft.replace(file)

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        more = {"logged": dict(trainer.logged_metrics), "names": {*trainer.lightning_module.state_dict()}}
        return super().get_extra_results(trainer) | more

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        trainer.logged_metrics.update(extra["logged"])
        made = extra["names"] - trainer.lightning_module.state_dict().keys()
        if made and trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(f"Ranks made layers that stay with them ({min(made)}): make them in __init__.")


def _read(files: Sequence[Path]) -> list[tuple[float, Any]]:
    """Return what ranks that came to the end of their work bring back, or when they failed, and how."""
    return [pickle.loads(file.read_bytes()) for file in files if file.exists()]
