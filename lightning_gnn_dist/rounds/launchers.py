"""Starts ranks on a host without torchrun or SLURM, and lets none of them stay behind.

These are Lightning's two launchers with what they lack: a rank that ends before its work is done is noticed whatever
its exit code, a rank that does not end after an error is killed, and all ranks end with the process that started them.
Written for Lightning 2.6, as they use private names of it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import start_processes

from lightning_gnn_dist.checks import check_choice, check_durations, shown
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.processes import GRACE_SECONDS, end_of, tie_to_parent, tied, wait_for
from lightning_gnn_dist.wire.roll_call import give_key

_SECONDS_BETWEEN_LOOKS = 0.2
_LEFT_BY_SIGTERM = 128 + signal.SIGTERM
_log = logging.getLogger(__name__)
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class Launch:
    """How ranks are started, how they exchange, and how long they wait for each other.

    Args:
        timeout: How long a collective may take before the ranks give up.
        start_timeout: How long the ranks wait for each other at the start. After it, the ranks that are there end and
            name those that are missing.
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch. Default: the one that fits the device.
        start_method: How Lightning starts the ranks when no launcher (torchrun, SLURM) did.
    """

    timeout: timedelta = timedelta(minutes=30)
    start_timeout: timedelta = timedelta(minutes=10)
    backend: str | None = None
    start_method: StartMethod = "popen"

    def __post_init__(self) -> None:
        check_durations(timeout=self.timeout, start_timeout=self.start_timeout)
        check_choice("start_method", self.start_method, StartMethod)
        name = self.backend
        if name is not None and not (isinstance(name, str) and name and collectives.has_backend(name)):
            raise ValueError(
                'backend must be "gloo", "nccl" or another that this torch was built with, or None for what fits the '
                f"device, got {shown(name)}."
            )


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further rank (``start_method="popen"``); this process is rank 0.

    Args:
        patience: Seconds that this process waits at its end for ranks that are not done, if none has failed.
        options: Arguments of Lightning's launcher.
    """

    def __init__(self, patience: float, **options: Any) -> None:
        super().__init__(**options)
        self._patience = patience
        self._has_failed = False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException:
            self._has_failed = True
            raise

    def lost(self) -> dict[int, str]:
        """Return the ranks of this host that are gone, and how each ended."""
        codes = [process.poll() for process in self.procs]
        first = self.cluster_environment.global_rank() + 1
        return {first + index: end_of(code) for index, code in enumerate(codes) if code is not None}

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = str(environment.node_rank()), str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        if self.num_nodes == 1:  # else other hosts start ranks of this run, too
            give_key()
        atexit.register(self._wait_for_ranks)
        for local_rank in range(1, self.num_processes):
            command, folder = _own_command(local_rank)
            variables = os.environ | {"LOCAL_RANK": str(local_rank)}
            self.procs.append(subprocess.Popen(tied(command), env=variables, cwd=folder))

    def _wait_for_ranks(self) -> None:
        """Wait at the end of this process for the other ranks, which end with it, and kill those that do not end."""
        failed = self._has_failed or hasattr(sys, "last_value")  # an exception that ended the script
        collectives.leave()  # who waits for this rank in an exchange hears of its end now
        seconds = GRACE_SECONDS if failed else self._patience
        for index in wait_for(self.procs, seconds):
            pid = self.procs[index].pid
            _log.error("Process %d (local rank %d) did not end in %g s and was killed.", pid, index + 1, seconds)


class FunctionLauncher(_MultiProcessingLauncher):
    """Starts all ranks by ``multiprocessing`` (``"spawn"``, ``"fork"``, ``"forkserver"``); this process is no rank."""

    _strategy: DDPStrategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._check(trainer)
        environment = self._strategy.cluster_environment
        assert environment is not None
        os.environ["MASTER_PORT"] = str(environment.main_port)  # chosen here, so that all ranks get the same
        if self._strategy.num_nodes == 1:
            give_key()
        context = multiprocessing.get_context(self._start_method)
        results = context.SimpleQueue()
        marks = [context.Pipe(duplex=False) for _ in range(self._strategy.num_processes)]
        rank = _Rank(function, [writer for _, writer in marks], self._start_method)
        states = [_GlobalStateSnapshot.capture()] if self._start_method == "spawn" else []
        if self._start_method == "fork":
            rank_zero_info(
                "start_method='fork': torch computes with one thread in each rank; 'spawn' has no such limit."
            )
        with self._sigterm_passed_on():
            group = start_processes(
                self._wrapping_function,
                args=(trainer, rank, args, kwargs, results, *states),
                nprocs=self._strategy.num_processes,
                start_method=self._start_method,
                join=False,
            )
            self.procs = group.processes
            try:
                output = _wait(group, results, [reader for reader, _ in marks])
            finally:
                _end(group)
                for file in group.error_files:
                    Path(file).unlink(missing_ok=True)
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        tie_to_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
        if self._start_method == "fork":
            # The threads of OpenMP stay behind in a fork: a second one would be waited for, for ever.
            torch.set_num_threads(1)
            os.environ["OMP_NUM_THREADS"] = "1"  # or Lightning sets another number
        super()._wrapping_function(process_idx, *args, **kwargs)

    def _check(self, trainer: Any) -> None:
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method == "spawn":
            _check_missing_main_guard()
        if trainer is not None and any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks):
            raise NotImplementedError(
                f"What Tuner finds in ranks that are started by start_method={self._start_method!r} does not come back "
                "to this process. Use the callback LearningRateFinder(), which searches at the beginning of the fit, "
                "or search with devices=1."
            )
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                f"A Trainer whose ranks are started by start_method={self._start_method!r} fits once. Make another "
                "Trainer, and go on by trainer.fit(..., ckpt_path=...)."
            )

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)
        if worker_output.weights_path is not None:
            with suppress(OSError):  # Lightning takes away the file, not the folder that it made for it
                Path(worker_output.weights_path).parent.rmdir()

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

        signal.signal(signal.SIGTERM, pass_on)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass
class _Rank:
    """The function that a process of :class:`FunctionLauncher` runs; it marks that the function has returned."""

    function: Callable[..., Any]
    marks: list[Any]
    start_method: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self.function(*args, **kwargs)
        except SystemExit as error:  # else its code may be 0, as if all were done
            left = isinstance(error, SIGTERMException)
            raise SystemExit(_LEFT_BY_SIGTERM if left else error.code or 1) from error
        except Exception as error:  # Lightning tells the data module in the process that started this one alone
            data = getattr(getattr(self.function, "__self__", None), "datamodule", None)
            if data is not None:
                data.on_exception(error)
            raise
        self.marks[int(os.environ["LOCAL_RANK"])].send_bytes(b"done")
        return result


def _own_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command that starts a rank like this process, and its folder, as Lightning finds them out."""
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            command, folder = _hydra_subprocess_cmd(local_rank)
            return list(command), folder
    return list(_basic_subprocess_cmd()), None


def _wait(group: Any, results: Any, marks: list[Any]) -> Any:
    """Return what rank 0 sends when all ranks are done; raise the error of the first one that fails."""
    output, left = None, False
    waiting = dict(enumerate(group.processes))
    while waiting:
        multiprocessing.connection.wait([process.sentinel for process in waiting.values()], _SECONDS_BETWEEN_LOOKS)
        for rank in [rank for rank, process in waiting.items() if process.exitcode is not None]:
            code = waiting.pop(rank).exitcode
            left |= code == _LEFT_BY_SIGTERM
            if code == 0 and not marks[rank].poll():
                _fail(group, f"Rank {rank} ended with exit code 0, but not at the end of its work.")
            if code not in (0, _LEFT_BY_SIGTERM):
                _fail_as(group, rank)
        if not results.empty():
            output = results.get()
    if left:
        raise SIGTERMException
    return output


def _fail(group: Any, reason: str) -> None:
    _end(group)
    raise RuntimeError(f"{reason} The other ranks are ended.")


def _fail_as(group: Any, rank: int) -> None:
    """End all ranks and raise what one has raised, in torch's words."""
    _end(group)
    group.sentinels = {group.processes[rank].sentinel: rank}  # the cause, and not who fell with it
    try:
        group.join()
    except (EOFError, UnpicklingError) as error:  # of the file that torch lets ranks write
        how = end_of(group.processes[rank].exitcode)
        raise RuntimeError(f"Rank {rank} {how}, and could not write down why: is the disk full?") from error


def _end(group: Any) -> None:
    """Give ranks some time to end by themselves, and end those that do not."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in group.processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for rank, process in enumerate(group.processes):
        if process.is_alive():
            process.kill()
            process.join()
            _log.error("Rank %d (process %d) did not end in %g s and was killed.", rank, process.pid, GRACE_SECONDS)
