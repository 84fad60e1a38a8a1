"""Start a lighthouse and elastic ranks on one machine: processes that go on when another one dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from lightning_gnn_dist.extensions.elastic.membership import (
    LIGHTHOUSE,
    RANK,
    RANKS,
    SIGN,
    check_available,
    is_silent,
    quieten,
    quorum_of,
    waits,
)
from lightning_gnn_dist.wire.addresses import own_interface
from lightning_gnn_dist.wire.launching.processes import LEFT_BY_SIGTERM, Command, end_all, end_of, start

_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def _handling(handler: Callable[..., Any], *numbers: int) -> Iterator[None]:
    """Let ``handler`` answer these signals in the block. Only the main thread may."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass
class Launcher:
    """Runs ``command`` as ``ranks`` processes until the last of them has ended.

    Args:
        command: The command that every rank runs.
        ranks: How many ranks to start.
        restarts: How often, in all, a rank that died is started again while others train.
        heartbeat_seconds: Seconds of silence after which a rank counts as dead.
        grace_seconds: Seconds that ranks have to end when the launcher itself is told to end.
        tell: Called with each line for the user.
    """

    command: Sequence[str]
    ranks: int
    restarts: int
    heartbeat_seconds: float
    grace_seconds: float
    tell: Callable[[str], None]
    _running: dict[int, Command] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)
    _signs: str = ""

    def run(self) -> int:
        """Run, and return the exit status: 0 if any rank finished the training, as then all of it is done."""
        check_available()
        told_to_end = _handling(_leave, signal.SIGTERM, signal.SIGHUP)  # as by Ctrl-C, so that no rank is left behind
        with told_to_end, TemporaryDirectory(prefix="elastic-") as self._signs, self._lighthouse() as address:
            try:
                for rank in range(self.ranks):
                    self._start(rank, address)
                while self._running:
                    for rank in [rank for rank, process in self._running.items() if process.exitcode is not None]:
                        self._hear_of_end(rank, address)
                    self._end_who_cannot_go_on()
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
            finally:
                self._end_all()
        return 0 if self._finished else 1

    @contextmanager
    def _lighthouse(self) -> Iterator[str]:
        quieten()
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(
            bind="127.0.0.1:0",  # all ranks are on this host
            min_replicas=quorum_of(self.ranks),
            join_timeout_ms=3_600_000,  # wait for a rank that is slow but alive
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * self.heartbeat_seconds),
        )
        try:
            yield f"http://127.0.0.1:{urlsplit(server.address()).port}"
        finally:
            server.shutdown()

    def _start(self, rank: int, address: str) -> None:
        self._sign(rank).unlink(missing_ok=True)  # of the rank that died
        told = {LIGHTHOUSE: address, RANK: str(rank), RANKS: str(self.ranks), SIGN: str(self._sign(rank))}
        # A session of its own: Ctrl-C reaches the launcher alone, and the rank's own children end with it.
        self._running[rank] = start(self.command, {**own_interface(), **os.environ, **told}, start_new_session=True)

    def _hear_of_end(self, rank: int, address: str) -> None:
        process = self._running.pop(rank)
        _signal_group(process, signal.SIGKILL)  # what it has started
        code, quorum = process.exitcode or 0, quorum_of(self.ranks)
        if code == 0:
            self._finished.add(rank)
            return
        finished = f" and {len(self._finished)} have finished" if self._finished else ""
        self.tell(f"Rank {rank} {end_of(code)}; {len(self._running)} of {self.ranks} are alive{finished}.")
        if code != LEFT_BY_SIGTERM and self.restarts and self._running and not self._finished:
            self.restarts -= 1
            self.tell(f"Rank {rank} is started again.")
            self._start(rank, address)
        elif 0 < len(self._running) < quorum and not self._finished:
            self.tell(f"They wait for a quorum of {quorum}.")

    def _end_who_cannot_go_on(self) -> None:
        """End ranks that wait for a quorum when others have finished, or stand still, if too few are left for one."""
        alive, seconds = len(self._running), self.heartbeat_seconds + self.grace_seconds
        signs = {rank: self._sign(rank) for rank in self._running}
        late = [rank for rank, sign in signs.items() if self._finished and waits(sign)]
        silent = [rank for rank, sign in signs.items() if is_silent(sign, seconds)]
        ended = dict.fromkeys(late, "came back too late to take part") if alive < quorum_of(self.ranks) else {}
        if alive - len(silent) < quorum_of(self.ranks):
            ended |= dict.fromkeys(silent, f"stands still for {seconds:g} s, and too few are left without it")
        for rank, why in ended.items():
            self.tell(f"Rank {rank} {why}: it is ended.")
            signs[rank].unlink(missing_ok=True)
            _signal_group(self._running[rank], signal.SIGKILL)

    def _sign(self, rank: int) -> Path:
        return Path(self._signs) / f"rank-{rank}"

    def _end_all(self) -> None:
        for process in self._running.values():
            _signal_group(process, signal.SIGTERM)
        end_all(self._running, self.grace_seconds)
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)  # what they have started


def _signal_group(process: Command, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
