"""The start of a run: all ranks meet in one store, and ranks that do not come are named.

The store listens where it has to and nowhere else: on one host at 127.0.0.1, on several at the address that the
ranks were given. A run has a key, which is part of all its entries, so that two runs at one port do not mix.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_gnn_dist.wire import addresses

RUN = "LIGHTNING_GNN_DIST_RUN"  # the environment variable that holds the key of the run
_OF_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_NUM_HOSTS = ("GROUP_WORLD_SIZE", "SLURM_NNODES")  # set by torchrun and SLURM
_calls = count()  # numbers the roll calls, of which all ranks make equally many
_SECONDS_TO_LEAVE = 5.0  # for all to hear who is missing, before rank 0 takes the store away


@dataclass(frozen=True)
class Roll:
    """Which ranks have to come, and where.

    Args:
        address: The address of rank 0, or of the launcher if that serves the store.
        port: The port of the store.
        rank: The number of this rank.
        num_ranks: How many ranks have to come.
        deadline: How long to wait for them.
        num_hosts: The number of hosts that they run on.
        lost: Returns the ranks that are known to have ended, and how each did, in words.
    """

    address: str
    port: int
    rank: int
    num_ranks: int
    deadline: timedelta
    num_hosts: int = 1
    lost: Callable[[], Mapping[int, str]] = dict

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on this host, so that no other host has to reach its ports."""
        told = any(os.environ.get(name) == "1" for name in _NUM_HOSTS)
        return self.num_hosts == 1 and (told or addresses.is_loopback(self.address))

    def call(self) -> Any:
        """Return when all ranks are here. If some do not come, raise an error that names them, on all that are here.

        It comes before the process group, which would wait for half an hour and then name nobody.

        Returns:
            The store for the process group.
        """
        if self.num_ranks == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        # Only a store of torchrun's own is left from the start before. Hosts that came later have counted fewer starts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _served_by_torchrun() else "0"
        open_to_all = dist.PrefixStore(f"lightning_gnn_dist/{attempt}/{next(_calls)}", self._store())  # type: ignore[attr-defined]
        store = dist.PrefixStore(_key(), open_to_all)  # type: ignore[attr-defined]
        if store.add(f"count/{self.rank}", 1) > 1:
            raise RuntimeError(
                f"Rank {self.rank} is already at {self.address}:{self.port}: two processes were given one rank, or two "
                f"runs one port. Give each run a MASTER_PORT of its own."
            )
        store.set(f"here/{self.rank}", socket.gethostname())
        missing = self._find_missing(store, open_to_all) if self.rank == 0 else self._hear_missing(store, open_to_all)
        if missing:
            self._refuse(store, missing)
        return dist.PrefixStore("group", store)  # type: ignore[attr-defined]

    def _store(self) -> Any:
        by_torchrun = _served_by_torchrun()
        if self.rank == 0 and not by_torchrun:
            return self._serve(addresses.HERE if self.on_one_host else addresses.own_address(self.address))
        address = addresses.HERE if self.on_one_host and not by_torchrun else self.address
        try:
            return addresses.join_store(address, self.port, self.deadline)
        except RuntimeError as error:
            raise TimeoutError(self._who_is_missing([0], _who_answers(address, self.port))) from error

    def _serve(self, address: str) -> Any:
        try:
            return addresses.serve_store(address, self.port, self.deadline)
        except RuntimeError as error:
            raise RuntimeError(
                f"Port {self.port} at {address or 'this host'} is taken, by another run perhaps. Choose another by "
                "MASTER_PORT."
            ) from error

    def _find_missing(self, store: Any, open_to_all: Any) -> list[int]:
        """The missing ranks, on rank 0. It decides who came in time, so that all agree."""
        open_to_all.set("run", _digest())
        keys = [f"here/{rank}" for rank in range(self.num_ranks)]
        absent = _look_for(store, keys, self.deadline.total_seconds(), lambda: bool(self.lost()))
        missing = [rank for rank, key in enumerate(keys) if key in absent]
        store.set("missing", json.dumps(missing))
        return missing

    def _hear_missing(self, store: Any, open_to_all: Any) -> list[int]:
        """The missing ranks, on the others, as rank 0 found them; without a word from it, each looks by itself."""
        patience = self.deadline + timedelta(seconds=_SECONDS_TO_LEAVE)
        with suppress(RuntimeError):
            open_to_all.wait(["run"], patience)
            self._check_run(open_to_all)
            store.wait(["missing"], patience)
            missing: list[int] = json.loads(store.get("missing"))
            return missing
        return [rank for rank in range(self.num_ranks) if not store.check([f"here/{rank}"])] or [0]

    def _check_run(self, open_to_all: Any) -> None:
        if open_to_all.get("run").decode() != _digest():
            raise ValueError(
                f"{self.address}:{self.port} is where another run meets: it has another key. Give each run a "
                f"MASTER_PORT of its own, and all ranks of a run the same {RUN}, or none."
            )

    def _refuse(self, store: Any, missing: list[int]) -> None:
        here = [rank for rank in range(self.num_ranks) if rank not in missing]
        store.set(f"heard/{self.rank}", "")
        if self.rank == 0:
            _look_for(store, [f"heard/{rank}" for rank in here], _SECONDS_TO_LEAVE, lambda: False)
        ended = {rank: how for rank, how in self.lost().items() if rank in missing}
        if ended:
            told = "; ".join(f"rank {rank} {how}" for rank, how in ended.items())
            raise RuntimeError(f"Of {self.num_ranks} ranks, {told} before the start. The others end, too.")
        names = ", ".join(f"{rank} on {store.get(f'here/{rank}').decode()}" for rank in here)
        raise TimeoutError(self._who_is_missing(missing, f"here: {names}"))

    def _who_is_missing(self, missing: list[int], detail: str) -> str:
        named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        return (
            f"Of {self.num_ranks} ranks, {named} did not start within {self.deadline.total_seconds():g} s ({detail}). "
            "Look into what was to start there, and whether its port can be reached; or give it longer by "
            "launch=Launch(start_timeout=...)."
        )


def _served_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _who_answers(address: str, port: int) -> str:
    """Why no store was found there, in words: its port may belong to another program, and rank 0 have ended by that."""
    with suppress(OSError), socket.create_connection((address, port), timeout=_SECONDS_TO_LEAVE):
        return (
            f"another program has port {port} at {address}, which rank 0 was to listen at: choose another by "
            "MASTER_PORT, and see what rank 0 says"
        )
    return f"nobody answers at {address}:{port}"


def give_key(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a random key for the ranks that this process is about to start, all on this host."""
    environment.setdefault(RUN, secrets.token_hex(16))


def _key() -> str:
    if RUN in os.environ:
        return os.environ[RUN]
    return "/".join(os.environ[name] for name in _OF_LAUNCHERS if name in os.environ) or "run"


def _digest() -> str:
    """A hash of the key, which does not reveal it."""
    return hashlib.sha256(_key().encode()).hexdigest()


def _look_for(store: Any, keys: Iterable[str], seconds: float, is_vain: Callable[[], bool]) -> set[str]:
    """Wait until all keys are set, the time is over, or ``is_vain()``; return the keys that are not set."""
    absent, end = set(keys), time.monotonic() + seconds
    for pause in addresses.pauses():
        absent = {key for key in absent if not store.check([key])}
        if not absent or time.monotonic() >= end or is_vain():
            break
        time.sleep(pause)
    return absent
