"""A server in a thread of the test, and clients."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import uvicorn

from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.app import Server, Service, listen
from lightning_gnn_dist.extensions.serving.question import Limits


@contextmanager
def serving(answerer: Answerer, limits: Limits = Limits()) -> Iterator[tuple[int, Server]]:  # noqa: B008  # frozen
    """Serve on a free port while the block runs."""
    with listen("127.0.0.1", 0) as listening:
        server = Server(uvicorn.Config(Service(answerer, limits).app(), log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join(90)
    assert not thread.is_alive()


class Client:
    """One connection for each request."""

    def __init__(self, port: int) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=90)

    def post(self, body: Any, path: str = "/predict") -> tuple[int, Any]:
        """The status and what was answered; a body may be text that is no JSON."""
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        self.connection.request("POST", path, data, {"Content-Type": "application/json"})
        return self._answer()

    def get(self, path: str) -> tuple[int, Any]:
        self.connection.request("GET", path)
        return self._answer()

    def _answer(self) -> tuple[int, Any]:
        self.response = self.connection.getresponse()
        text = self.response.read().decode()
        self.connection.close()
        return self.response.status, json.loads(text) if text.startswith("{") else text
