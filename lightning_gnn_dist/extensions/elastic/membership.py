r"""Membership: ranks that may die and come back, by torchft's lighthouse and manager.

Every rank is a world of its own, without a process group. A lighthouse, one process for all ranks, hears their
heartbeats and decides at each meeting who takes part: the quorum, a majority. A manager in each rank connects it with
the other members for each exchange, and sends a rank that is behind the state of one that is not.

A meeting that a member does not survive is held again without it, so the other members get

.. math::
    \theta \leftarrow \frac{\sum_p w_p \theta_p}{\sum_p w_p} \quad\text{over those who came to the end.}
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_positive
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.addresses import HERE, is_loopback, serve_store
from lightning_gnn_dist.wire.collectives import flatten, op_of, write_back

# Variables of the environment:
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # the address of the lighthouse
RANK = "LIGHTNING_GNN_DIST_RANK"  # the number of this rank, for its name
RANKS = "LIGHTNING_GNN_DIST_RANKS"  # how many ranks the launcher started
SIGN = "LIGHTNING_GNN_DIST_SIGN"  # the file by which the launcher sees that the rank lives
_WAITS = "waits"  # what the file says while the rank waits for a quorum
_SECONDS_BETWEEN_TOUCHES = 1.0


@dataclass(frozen=True)
class Patience:
    """How long members wait for each other; :class:`Elastic` says what each number means."""

    patience: float = 600.0
    timeout: float = 30.0
    attempts: int = 10
    ranks: int = field(default_factory=lambda: int(os.environ.get(RANKS, "1")))
    start: float = 60.0

    def __post_init__(self) -> None:
        check_positive(patience=self.patience, timeout=self.timeout, start=self.start)
        check_at_least(1, attempts=self.attempts, ranks=self.ranks)


def check_available() -> None:
    """Refuse elastic training where torchft is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise ValueError("Elastic() needs torchft, which is not installed: pip install lightning-gnn-dist[elastic].")


def quieten() -> None:
    """Let torchft log errors alone, unless the user says otherwise. Call it before torchft is imported.

    For the time of a line its threads read the environment without a lock: the process crashes if it sets a variable
    meanwhile.
    """
    os.environ.setdefault("RUST_LOG", "error")


def quorum_of(num_ranks: int) -> int:
    """How many ranks must be alive: a majority, so that two halves never train apart."""
    return num_ranks // 2 + 1


class Sign:
    """The file by which the launcher of an elastic rank sees that it lives, and whether it waits for a quorum.

    It is touched every second, from :meth:`show` until :meth:`leave`. Without a launcher nothing is done.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ[SIGN]) if SIGN in os.environ else None
        self._has_left = threading.Event()

    def show(self) -> None:
        """Show that this rank lives."""
        if self._path is not None:
            threading.Thread(target=self._touch_often, args=[self._path], daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show during the block that this rank waits."""
        self._say(_WAITS)
        try:
            yield
        finally:
            self._say("")

    def leave(self) -> None:
        """Take the file away."""
        self._has_left.set()

    def _say(self, word: str) -> None:
        if self._path is not None:
            self._path.write_text(word)

    def _touch_often(self, path: Path) -> None:
        with suppress(FileNotFoundError):  # the launcher has ended and deleted its folder
            while not self._has_left.is_set():
                path.touch()
                self._has_left.wait(_SECONDS_BETWEEN_TOUCHES)
            path.unlink()


def waits(path: Path) -> bool:
    """Whether the rank of a file waits for a quorum."""
    return path.is_file() and path.read_text() == _WAITS


def is_silent(path: Path, seconds: float) -> bool:
    """Whether a rank has shown itself, but not for some seconds."""
    with suppress(FileNotFoundError):  # the rank does not train yet
        return path.stat().st_mtime < time.time() - seconds
    return False


_SECONDS_OF_SILENCE = 20.0
State = dict[str, Any]
_log = logging.getLogger(__name__)


class Seat(NamedTuple):
    """A rank's place, from 0, among the ``of`` members that take part."""

    place: int
    of: int


class Membership:
    """Takes part in the meetings for this rank.

    Args:
        elastic: How long to wait.
        state: Returns the state that a rank that is behind needs.
        load_state: Loads the state that another rank's ``state`` returned.
        step: The number of meetings before the checkpoint that this run goes on from.
    """

    def __init__(self, elastic: Patience, state: Callable[[], State], load_state: Callable[[State], None], step: int):
        self.elastic = elastic
        self.seat = Seat(0, 1)
        self.was_behind = False
        self._load_state = load_state
        self._manager, self._store = _connect(elastic, state, self._catch_up)
        self._sign = Sign()
        self._sign.show()
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def meet(
        self, tensors: Callable[[list[list[int]]], list[Tensor]], weight: float, numbers: Callable[[], list[int]]
    ) -> list[list[int]]:
        """Replace ``tensors(rows)`` by their weighted mean over the members. Returns all members' ``rows``, by place.

        A rank that was behind is brought up to date first, and its weight does not count. Integers become the largest
        of all. If the weights add up to 0, floats stay as they are. A member's row is what its ``numbers()`` returns.
        """
        start, self.was_behind = time.perf_counter(), False
        while True:
            self._find_quorum()
            rows = self._exchange(numbers())
            flats = flatten(tensors(rows), 0.0 if self.was_behind else weight, torch.device("cpu"))
            self._reduce_([flat for flat, _ in flats])
            if self._manager.should_commit():
                break  # otherwise a member was lost: try again with those who are left
        write_back(flats)
        collectives.traffic.seconds += time.perf_counter() - start
        return rows

    def _exchange(self, row: list[int]) -> list[list[int]]:
        """The rows of all members, by place. They mean nothing if a member is lost: then nobody commits to them."""
        rows = torch.zeros(self.seat.of, len(row), dtype=torch.float64)  # exact for integers of up to 53 bits
        rows[self.seat.place] = torch.tensor(row, dtype=torch.float64)
        self._reduce_([rows])
        numbers: list[list[int]] = rows.round().to(torch.int64).tolist()
        return numbers

    def leave(self) -> None:
        """Stop serving the others, who go on without this rank."""
        self._sign.leave()
        self._manager.shutdown(wait=False)

    def _find_quorum(self) -> None:
        told = ["%s waits for a quorum, at most %g seconds.", name_of_rank(), self.elastic.patience]
        reminder = threading.Timer(_SECONDS_OF_SILENCE, _log.warning, told)
        reminder.daemon = True
        reminder.start()
        try:
            with self._sign.waiting():
                self._manager.start_quorum()
        except TimeoutError as error:
            raise RuntimeError(
                f"No quorum in {self.elastic.patience:g} seconds: fewer ranks are alive than the lighthouse at "
                f"{os.environ[LIGHTHOUSE]} asks for, or it is gone. The last checkpoint is complete; start again with "
                "ckpt_path."
            ) from error
        finally:
            reminder.cancel()
        self.seat = Seat(self._manager.participating_rank(), self._manager.num_participants())

    def _reduce_(self, flats: list[Tensor]) -> None:
        for flat in flats:
            # All members call this: they have the same quorum, and each comes here once per attempt.
            self._manager.allreduce(flat, reduce_op=op_of(flat)).wait()
            share = 2 * (self.seat.of - 1) / self.seat.of
            collectives.traffic.bytes_sent += share * flat.nbytes

    def _catch_up(self, state: State) -> None:
        self.was_behind = True
        self._load_state(state)


# Torchft's manager, which connects this rank with the other members and finds them at the lighthouse.


def _lighthouse() -> str:
    if LIGHTHOUSE not in os.environ:
        raise ValueError(
            f"An elastic rank finds the others by {LIGHTHOUSE}=http://host:port in the environment: start the ranks "
            "with `lightning-gnn-dist elastic --ranks 4 -- python train.py`, or a torchft_lighthouse of your own."
        )
    return os.environ[LIGHTHOUSE]


def _connect(elastic: Patience, state: Callable[[], State], load_state: Callable[[State], None]) -> tuple[Any, Any]:
    """Return the manager, and the store that it serves from."""
    stays_on_host = is_loopback(urlsplit(_lighthouse()).hostname or "")
    store = serve_store(HERE if stays_on_host else "")
    with _ports_kept(stays_on_host):
        return _manager(elastic, state, load_state, store.port, stays_on_host), store


def _manager(
    elastic: Patience, state: Callable[[], State], load_state: Callable[[State], None], port: int, stays_on_host: bool
) -> Any:
    quieten()
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.http_transport import HTTPTransport

    timeout, patience = timedelta(seconds=elastic.timeout), timedelta(seconds=elastic.patience)
    name = HERE if stays_on_host else socket.gethostname()
    transport = HTTPTransport(timeout=timeout, num_chunks=0)
    if stays_on_host:  # by itself it would give the others the host's name, at which it does not listen
        transport.address = lambda: f"http://{HERE}:{transport._server.server_port}/checkpoint/"
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        state_dict=state,
        load_state_dict=load_state,
        min_replica_size=1,  # the lighthouse alone decides how many a quorum needs
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=patience,
        connect_timeout=timeout,
        max_retries=elastic.attempts,
        rank=0,
        world_size=1,
        store_addr=name,
        store_port=port,
        replica_id=name_of_rank(),
        hostname=name,
        checkpoint_transport=transport,
    )


@contextmanager
def _ports_kept(on_host: bool) -> Iterator[None]:
    """If ``on_host``, torchft's servers made in the block listen to this host alone. torchft has no option for that."""
    if not on_host:
        yield
        return
    from torchft import manager
    from torchft.checkpointing import http_transport

    served, fetched = manager.ManagerServer, http_transport._IPv6HTTPServer
    manager.ManagerServer = lambda **options: served(**options | {"bind": f"{HERE}:0"})
    http_transport._IPv6HTTPServer = lambda address, handler: ThreadingHTTPServer((HERE, address[1]), handler)
    try:
        yield
    finally:
        manager.ManagerServer, http_transport._IPv6HTTPServer = served, fetched


def name_of_rank() -> str:
    """The name of this rank at the lighthouse. Places follow the order of names."""
    for variable in (RANK, "SLURM_PROCID", "RANK"):
        if variable in os.environ:
            return f"rank{int(os.environ[variable]):05d}"
    return f"{socket.gethostname()}-{os.getpid()}"
