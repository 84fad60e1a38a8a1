"""Runs the application until it is told to end: it answers what it has taken, and takes nothing new."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

MOST_CONNECTIONS = 1024
_BACKLOG = 1024


class Server(uvicorn.Server):
    """Ends with status 0 when it is told to end: uvicorn would send itself the signal again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:  # of a port above 65535
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"host {host!r} and port {port} cannot be had ({why}): choose others.") from error
    # Those of its connections have it, too. Else the body of an answer waits 40 ms, until its head is acknowledged.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def run(app: Starlette, listening: socket.socket, seconds: float, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT comes.

    Args:
        app: The application.
        listening: Where requests come.
        seconds: How long what was taken may take at the end.
        ready: Called before the first request is taken.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(seconds)),
    )
    ready()
    Server(config).run(sockets=[listening])
