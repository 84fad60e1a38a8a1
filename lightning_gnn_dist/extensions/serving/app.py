"""The server's answers by HTTP: ``POST /predict`` with JSON, and ``GET /health``.

request -> waits, or is refused where too many do -> answered with others in one thread -> its row, or too late

200 answer    400 malformed    408 slow to come    413 too large    500 the model failed    503 full    504 too late
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.question import Limits, Question, RefusedError

log = logging.getLogger(__name__)
RETRY_AFTER = {"Retry-After": "1"}  # seconds
MOST_CONNECTIONS = 1024
_BACKLOG = 1024


@dataclass(frozen=True, eq=False)
class _Entry:
    question: Question
    answer: asyncio.Future[bytes]


class Service:
    """The application: requests wait for their answers in the order in which they came.

    Args:
        answerer: Answers requests, in a thread.
        limits: What the server does at most.
    """

    def __init__(self, answerer: Answerer, limits: Limits) -> None:
        self._answerer, self._limits = answerer, limits
        self._line, self._came = deque[_Entry](), asyncio.Event()

    def app(self) -> Starlette:
        """Return what a server of ASGI runs."""
        routes = [Route("/predict", self._predict, methods=["POST"]), Route("/health", self._health)]
        refused = {HTTPException: _refuse_address}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=refused)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        answering = asyncio.create_task(self._run())
        yield
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering

    async def _ask(self, question: Question) -> bytes:
        """Return the answer to a request."""
        if len(self._line) >= self._limits.waiting:
            raise RefusedError(f"{self._limits.waiting} requests wait already: ask again later.", 503)
        entry = _Entry(question, asyncio.get_running_loop().create_future())
        self._line.append(entry)
        self._came.set()
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await entry.answer
        except TimeoutError as error:
            raise RefusedError(f"The request was not answered within {self._limits.seconds:g} s.", 504) from error
        finally:
            if entry in self._line:
                self._line.remove(entry)

    async def _run(self) -> None:
        """Answer requests until this is cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "answers") as thread:
            while True:
                await self._came.wait()
                taken = self._taken()
                if not self._line:
                    self._came.clear()
                found = await loop.run_in_executor(thread, self._answers, [entry.question for entry in taken])
                for entry, answer in zip(taken, found, strict=True):
                    if not (told := entry.answer).done():  # somebody waits still
                        told.set_exception(answer) if isinstance(answer, Exception) else told.set_result(answer)

    def _taken(self) -> list[_Entry]:
        """Take the first requests, together as long as they ask for few nodes; a larger one is alone."""
        taken, nodes = list[_Entry](), 0
        while self._line and (not taken or nodes + len(self._line[0].question.nodes) <= self._answerer.nodes_at_once):
            taken.append(self._line.popleft())
            nodes += len(taken[-1].question.nodes)
        return taken

    def _answers(self, questions: list[Question]) -> list[bytes | Exception]:
        """Answer requests together, or where that fails each alone, so that none spoils another's. Runs in a thread."""
        try:
            found = self._answerer.rows(questions)
            return [json.dumps({"rows": rows.tolist()}, allow_nan=False).encode() for rows in found]
        except Exception as error:
            if len(questions) == 1:
                return [error]
        return [answer for question in questions for answer in self._answers([question])]

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "waiting": len(self._line), **self._answerer.about})

    async def _predict(self, request: Request) -> Response:
        try:
            question = self._answerer.form.read(_parsed(await self._body(request)))
            return Response(await self._ask(question), media_type="application/json")
        except RefusedError as error:
            return _refusal(error.status, str(error), RETRY_AFTER if error.status == 503 else None)
        except Exception:  # of the model: others go on
            log.exception("A request could not be answered.")
            return _refusal(500, "The model failed on this request: the server's log says how.")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request; one that is too large or too slow is refused, and not read to its end."""
        body, most = bytearray(), self._limits.bytes
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise RefusedError(f"The body of a request may have {most} bytes: ask several times.", 413)
        except TimeoutError:
            raise RefusedError(f"The body did not come within {self._limits.seconds:g} s.", 408) from None
        except ClientDisconnect:
            raise RefusedError("The connection ended before the body.") from None
        return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RefusedError("The body is nested too deep: write lists of lists at most.") from None
    except ValueError as error:
        raise RefusedError(f"The body must be JSON: {error}.") from None


async def _refuse_address(request: Request, error: Exception) -> Response:
    """Say what is answered where a request has another path or method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    sentence = f"Ask by POST /predict or GET /health, got {shown(asked)}."
    return _refusal(error.status_code, sentence, error.headers)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)


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
