"""Where ranks reach each other: the address at which this one listens alone, and the stores that ranks meet at."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

HERE = "127.0.0.1"
_PATIENCE = timedelta(minutes=5)  # torch's default for a store
_BACKLOG = 2048  # connections that wait to be taken
INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable that names the network interface of gloo
_ADDRESS_OF = 0x8915  # Linux's request for the address of an interface
_keeps_on_host = False  # whether channels open their ports to this host alone
_log = logging.getLogger(__name__)


def towards(host: str) -> str:
    """The address of this host on the way to another; nothing is sent."""
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
                way.connect(place)
                return str(way.getsockname()[0])
    return HERE


def of_interface() -> str:
    """The address of the interface that the user has named for gloo, or "" where that is not known."""
    name = os.environ.get(INTERFACE, "").split(",")[0]
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24]) if name else ""
    return ""


@contextmanager
def kept_on_host(kept: bool | None = None) -> Iterator[None]:
    """If ``kept``, groups made in the block, and channels from now on, open their ports to this host alone.

    None: as was said last. Otherwise gloo takes the interface of the host's name. An interface that the user has named
    is used in any case.
    """
    global _keeps_on_host
    kept = _keeps_on_host = _keeps_on_host if kept is None else kept
    added = {name: value for name, value in own_interface().items() if kept and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def keeps_on_host() -> bool:
    """Whether the groups of this process open their ports to this host alone."""
    return _keeps_on_host


def own_interface() -> dict[str, str]:
    """The environment variable by which gloo opens its ports to this host alone, empty without a loopback."""
    own = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    return {INTERFACE: own.pop()} if own else {}


def is_loopback(address: str) -> bool:
    """Whether an address or name means this host and can be reached from nowhere else."""
    with suppress(OSError):
        return all(ipaddress.ip_address(found).is_loopback for found in _addresses(address))
    return False


def own_address(address: str) -> str:
    """The address of this host that the ranks were told, or ``""`` for all addresses if none can be found."""
    for found in _addresses(address):
        if ipaddress.ip_address(found).is_loopback:
            continue  # other hosts know this one by another address
        with suppress(OSError), socket.create_server((found, 0), family=family_of(found)):
            return found
    _log.warning("%s is no address of this host that others can reach: the store listens at all of them.", address)
    return ""


def _addresses(address: str) -> list[str]:
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def family_of(address: str) -> socket.AddressFamily:
    """The family of addresses that a numeric one is of."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that no other program is given in the block, and at which this run may listen.

    A socket has it and does not listen, which lets others listen there who name the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def serve_store(address: str, port: int = 0, deadline: timedelta = _PATIENCE) -> Any:
    """A key-value store in this process that listens at ``address`` alone, or at all addresses (``""``).

    Raises a RuntimeError if another process listens there.
    """
    everywhere = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    how: Any = everywhere if not address else {"family": family_of(address)}
    options: Any = {"wait_for_workers": False, "multi_tenant": True}
    try:
        with socket.create_server((address, port), backlog=_BACKLOG, **how) as listener:
            port, handle = listener.getsockname()[1], os.dup(listener.fileno())
        options["master_listen_fd"] = handle  # torch's own socket would listen at every address, whatever it is told
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # If this process has a store at that port, torch shares it; if another process has one, torch raises.
    return dist.TCPStore(address or "localhost", port, None, True, deadline, **options)  # type: ignore[attr-defined]


def join_store(address: str, port: int, deadline: timedelta) -> Any:
    """The key-value store that another process serves. Raises a RuntimeError if it does not answer in time."""
    found: Future[Any] = Future()

    def join() -> None:
        try:
            wait_for_listener(address, port, time.monotonic() + deadline.total_seconds())
            store = dist.TCPStore(address, port, None, False, deadline, wait_for_workers=False)  # type: ignore[attr-defined]
            found.set_result(store)
        except Exception as error:  # it is raised where the result is asked for
            found.set_exception(error)

    # In a thread, for torch waits without end for a program that listens at the port and says nothing.
    Thread(target=join, daemon=True).start()
    try:
        return found.result(deadline.total_seconds() + 1.0)
    except TimeoutError as error:
        raise RuntimeError(f"What listens at {address}:{port} says nothing.") from error


def wait_for_listener(address: str, port: int, end: float) -> None:
    """Wait until somebody listens there.

    It tries often: torch itself, once refused, waits for half a second or more before it asks again.
    """
    for pause in pauses():
        try:
            return socket.create_connection((address, port), timeout=max(1.0, end - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"Nobody answers at {address}:{port}.") from error
        time.sleep(pause)


def pauses() -> Iterator[float]:
    """Yield seconds to wait between two looks, without end: short at first, then longer."""
    pause = 0.004
    while True:
        yield pause
        pause = min(2 * pause, 0.1)
