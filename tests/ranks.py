"""Run one function as the ranks of a distributed job, each in a process of its own.

The processes are forked from a server that has imported torch, Lightning and this package once, and loaded
what `tests.warm` loads, so a rank costs a fraction of a second and no test shares state with another. The server
itself is forked from pytest before the first test (`fork_server`), or started where nobody has done so. A rank
finds the environment that a launcher would give it (`LOCAL_RANK`, `MASTER_ADDR`, ...), so a
`Trainer(accelerator="cpu", devices=world_size, strategy=...)` inside it takes part as that rank and starts no
process of its own.

    def train(rank: int, world_size: int, steps: int) -> float: ...  # module level: imported by name

    losses = run_ranks(train, 2, 10)  # [loss of rank 0, loss of rank 1]

    with start_ranks(train, 3, 10) as ranks:  # the same, with a hand on the processes
        os.kill(ranks.pids[1], signal.SIGKILL)
        losses = ranks.results(may_die={1})  # None for a rank that died
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from select import select
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

from lightning_gnn_dist.wire.addresses import held_port

GRACE_SECONDS = 10.0  # for the others to notice that a rank failed
LEAVE_SECONDS = 30.0  # for a rank to leave when all have returned: on a busy machine, seconds
MARGIN_SECONDS = 15.0  # a stuck rank writes its stacks and leaves by itself; this much later it is killed
START = util.spawnv_passfds  # type: ignore[attr-defined]
PRELOAD = ["tests.no_garbage", "lightning.pytorch", "torch_geometric.nn", "torchmetrics", "numba", "pytest"]
PRELOAD += ["jsonargparse"]  # a warning filter names one of its classes
PRELOAD += ["torch.distributed.algorithms.ddp_comm_hooks", "torch.utils.serialization.config"]
PRELOAD += ["fsspec.implementations.chained", "tests.every_strategy", "tests.boundary.models"]
PRELOAD += ["lightning.pytorch.cli", "lightning_gnn_dist.cli.train", "tests.ranks", "tests.warm"]
# Importing torch_geometric can start CUDA's driver, and no fork of a process that has done so can use a GPU.
IS_PRETENDED = find_spec("pretend") is not None
HAS_GPU = torch.cuda.device_count() > 0 and not IS_PRETENDED
CONTEXT: Any = multiprocessing.get_context("spawn" if HAS_GPU else "forkserver")
if not HAS_GPU:
    CONTEXT.set_forkserver_preload(PRELOAD)


def fork_server() -> None:
    """Fork the server from this process, which has imported most of what ranks need. It loads the rest when asked.

    For a process in which no test has run yet, and nothing has started a thread that a fork would miss.
    """
    if HAS_GPU or IS_PRETENDED:
        return
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork  # type: ignore[attr-defined]  # in the place of a command
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, since Python 3.12
            forkserver.ensure_running()
    finally:
        util.spawnv_passfds = START  # type: ignore[attr-defined]


def _fork(_: Any, command: list[str], fds: tuple[int, ...]) -> int:
    """Run the command's code in a fork that keeps nothing of pytest open: who waits for the end of a pipe sees it."""
    if pid := os.fork():
        return pid
    try:
        util.spawnv_passfds = START  # type: ignore[attr-defined]
        faulthandler.disable()
        nothing, tracker = os.open(os.devnull, os.O_RDWR), resource_tracker.getfd()  # type: ignore[attr-defined]
        for fd in map(int, os.listdir("/dev/fd")):
            if fd not in {0, 1, 2, nothing, tracker, *fds}:
                with suppress(OSError):  # that of the list itself
                    os.fstat(fd), os.dup2(nothing, fd, inheritable=False)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        listener, end_of_pytest, *_ = fds
        if listener in select([listener, end_of_pytest], [], [])[0]:
            exec(command[-1], {})
    finally:
        os._exit(0)


class RankError(RuntimeError):
    """Ranks that failed, died or did not finish: `failures` tells of each, the first cause first."""

    def __init__(self, world_size: int, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("\n".join(f"rank {rank} of {world_size} {text}" for rank, text in failures.items()))


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180, grace: float = GRACE_SECONDS
) -> list[Any]:
    """Call `function(rank, world_size, *args)` in `world_size` processes; return the results by rank.

    `grace` is how many seconds the others have when a rank has failed: few where it is known that they wait for it.

    Arguments and results are pickled. The caller's warning filters, environment and working directory hold in
    the ranks too. An exception that ends a thread or is raised in a destructor is a failure of the rank.

    Raises:
        RankError: A rank raised, died, did not finish in `timeout` seconds, or returned but did not leave.
    """
    with start_ranks(function, world_size, *args, timeout=timeout, grace=grace) as ranks:
        return ranks.results()


def join(rank: int, world_size: int) -> None:
    """Make the group of all ranks, where no Trainer does."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120))


@contextmanager
def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180, grace: float = GRACE_SECONDS
) -> Iterator[Ranks]:
    """Start what `run_ranks` runs and hand it out. No process is left behind, however the block ends."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, held_port() as port:
        ranks = Ranks(world_size, timeout, Path(folder), port, grace)
        try:
            ranks._start(function, args)
            yield ranks
        finally:
            ranks._kill()


class Ranks:
    """The running ranks of one job, made by `start_ranks`."""

    def __init__(self, world_size: int, timeout: float, folder: Path, port: int, grace: float) -> None:
        self._world_size, self._timeout, self._folder, self._grace = world_size, timeout, folder, grace
        self._port = port
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._values: dict[int, Any] = {}
        self._failures: list[tuple[float, int, str]] = []  # when, rank, what
        self._heard: set[int] = set()
        self._deadline = 0.0

    @property
    def pids(self) -> list[int]:
        """The process id of every rank, to send signals to."""
        return [process.pid for process in self._processes]

    def results(self, may_die: Collection[int] = ()) -> list[Any]:
        """Wait for all ranks; return what they returned, and None for those of `may_die` that were killed."""
        everyone = set(range(self._world_size))
        self.wait_for(everyone, may_die)
        for rank in sorted(everyone - self._heard):
            self._fail(rank, f"did not finish in time ({self._timeout:g} s) and was killed", time.monotonic())
        if not self._failures:
            self._release()
        if self._failures:
            raise RankError(self._world_size, {rank: text for _, rank, text in sorted(self._failures)})
        return [self._values.get(rank) for rank in range(self._world_size)]

    def wait_for(self, ranks: Collection[int], may_die: Collection[int] = ()) -> None:
        """Wait until these have returned or failed, at most as long as all may take."""
        missing = {*ranks} - self._heard
        while missing and (ready := self._ready(missing)):
            for rank in ready:
                self._take(rank, rank in may_die)
            missing -= ready
            self._heard |= ready

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Pickled here: multiprocessing itself would put tensors into memory that all ranks share.
        work = pickle.dumps((function, args))
        place = _Place.of_caller(self._world_size, self._timeout, self._folder, self._port)
        for rank in range(self._world_size):
            here, there = CONTEXT.Pipe()
            self._pipes.append(here)
            with there:
                process = CONTEXT.Process(target=_be_rank, args=(rank, place, work, there))
                process.start()
            self._processes.append(process)
        self._deadline = time.monotonic() + self._timeout + MARGIN_SECONDS  # after the server's imports

    def _ready(self, ranks: set[int]) -> set[int]:
        """Those of `ranks` that have returned, failed or died; empty when the time is over."""
        sources: dict[Any, int] = {self._pipes[rank]: rank for rank in ranks}
        sources |= {self._processes[rank].sentinel: rank for rank in ranks}
        return {sources[source] for source in wait(sources, max(0.0, self._deadline - time.monotonic()))}

    def _take(self, rank: int, may_die: bool) -> None:
        if (message := self._message(rank)) is not None:
            returned, content, when = message
            if returned:
                self._values[rank] = content
            else:
                self._fail(rank, content, when)
        elif not may_die:
            self._fail(rank, *self._death(rank))

    def _message(self, rank: int) -> tuple[bool, Any, float] | None:
        """What a rank sent, None if it died before it could."""
        pipe = self._pipes[rank]
        try:
            # The loader workers of a dead rank may still hold its end of the pipe: do not wait for the end.
            return pickle.loads(pipe.recv_bytes()) if pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def _fail(self, rank: int, text: str, when: float) -> None:
        self._failures.append((when, rank, text))
        self._deadline = min(self._deadline, time.monotonic() + self._grace)

    def _death(self, rank: int) -> tuple[str, float]:
        """Why a rank left without a word, and when: 0 for a death, which comes before all that follows."""
        self._processes[rank].join(GRACE_SECONDS)
        stacks = self._folder / f"{rank}.txt"
        if stacks.exists() and (text := stacks.read_text()):
            return f"did not finish in time ({self._timeout:g} s); its stacks: {text}", time.monotonic()
        return f"died with exit code {self._processes[rank].exitcode} before it returned", 0.0

    def _release(self) -> None:
        """Let all ranks leave together: rank 0 serves the store, and another may still read from it."""
        for rank in self._values:
            with suppress(BrokenPipeError):  # it died since; its exit code tells
                self._pipes[rank].send_bytes(b"leave")
        for rank in self._values:
            self._processes[rank].join(LEAVE_SECONDS)
            if exitcode := self._processes[rank].exitcode:
                self._fail(rank, f"returned, but left with exit code {exitcode}", 0.0)
            elif exitcode is None:
                self._fail(rank, "returned, but did not leave: does a thread of its own still run?", 0.0)

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the rank and the loader workers that it started
            process.kill()  # it may not have made its group yet
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()


def quieten() -> None:
    """One thread for torch, nothing from Lightning below an error, and no work of its that is done for nothing."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    registry.entry_points = _entry_points  # nine tenths of the time that a Trainer takes to be made
    if not torch.cuda.is_available():
        # Where all is on one device: a fifth of the time of a rank, for each number that is logged.
        _ResultMetric.to = lambda metric, *_args, **_options: metric  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Place:
    """What surrounds a rank: the same for all of them, and as the caller has it."""

    world_size: int
    timeout: float
    folder: Path
    port: int
    environment: dict[str, str]
    filters: list[Any]
    start_method: str | None

    @classmethod
    def of_caller(cls, world_size: int, timeout: float, folder: Path, port: int) -> _Place:
        start_method = multiprocessing.get_start_method(allow_none=True)
        filters = list(warnings.filters)
        return cls(world_size, timeout, folder, port, dict(os.environ), filters, start_method)

    def enter(self, rank: int) -> None:
        os.environ.clear()  # the server's, as old as the first test that used it
        os.environ.update(self.environment, OMP_NUM_THREADS="1", NODE_RANK="0", LOCAL_RANK=str(rank))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(self.world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        # Lightning read the rank and multiprocessing its start method when the server began.
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        multiprocessing.set_start_method(self.start_method, force=True)
        warnings.resetwarnings()
        warnings.filters.extend(self.filters)  # type: ignore[attr-defined]
        quieten()


def _be_rank(rank: int, place: _Place, work: bytes, pipe: Connection) -> None:
    """The life of a rank's process."""
    os.setpgid(0, 0)
    gc.freeze()  # what the server imported
    with (place.folder / f"{rank}.txt").open("w") as stacks:
        # Holds whatever becomes of the caller, and also inside a collective that never returns.
        faulthandler.dump_traceback_later(place.timeout, exit=True, file=stacks)
        try:
            place.enter(rank)
            outcome = pickle.dumps((True, _call(rank, place.world_size, work), time.monotonic()))
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, f"failed:\n{traceback.format_exc()}", time.monotonic())))
            sys.stdout.flush()
            os._exit(1)  # at once: the closed connection tells those who wait for this rank in a collective
        faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(outcome)
    pipe.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(rank: int, world_size: int, work: bytes) -> Any:
    """The result of the function, unless something went wrong where an exception reaches nobody."""
    unheard: list[str] = []
    sys.unraisablehook = lambda event: unheard.append("".join(traceback.format_exception(event.exc_value)))
    threading.excepthook = lambda event: unheard.append("".join(traceback.format_exception(event.exc_value)))
    function, args = pickle.loads(work)
    result = function(rank, world_size, *args)
    gc.collect()
    if unheard:
        raise RuntimeError("exceptions in threads or destructors:\n" + "\n".join(unheard))
    return result


@cache
def _entry_points(group: str) -> Any:
    return entry_points(group=group)
