"""Torchft's manager, by which a rank is connected with the other members, and which finds them at the lighthouse."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from lightning_gnn_dist.wire.addresses import HERE, is_loopback, serve_store
from lightning_gnn_dist.wire.elastic import LIGHTHOUSE, RANK, Elastic, quieten

State = dict[str, Any]


def _lighthouse() -> str:
    if LIGHTHOUSE not in os.environ:
        raise ValueError(
            f"An elastic rank finds the others by {LIGHTHOUSE}=http://host:port in the environment: start the ranks "
            "with `lightning-gnn-dist elastic --ranks 4 -- python train.py`, or a torchft_lighthouse of your own."
        )
    return os.environ[LIGHTHOUSE]


def connect(elastic: Elastic, state: Callable[[], State], load_state: Callable[[State], None]) -> tuple[Any, Any, Any]:
    """Return the process group of the members, its manager, and the store that the manager serves from."""
    stays_on_host = is_loopback(urlsplit(_lighthouse()).hostname or "")
    store = serve_store(HERE if stays_on_host else "")
    with _ports_kept(stays_on_host):
        group, manager = _manager(elastic, state, load_state, store.port, stays_on_host)
    return group, manager, store


def _manager(
    elastic: Elastic, state: Callable[[], State], load_state: Callable[[State], None], port: int, stays_on_host: bool
) -> tuple[Any, Any]:
    quieten()
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.http_transport import HTTPTransport

    timeout, patience = timedelta(seconds=elastic.timeout), timedelta(seconds=elastic.patience)
    name = HERE if stays_on_host else socket.gethostname()
    transport = HTTPTransport(timeout=timeout, num_chunks=0)
    if stays_on_host:  # by itself it would give the others the host's name, at which it does not listen
        transport.address = lambda: f"http://{HERE}:{transport._server.server_port}/checkpoint/"
    group = ProcessGroupGloo(timeout=timeout)
    return group, Manager(
        pg=group,
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
