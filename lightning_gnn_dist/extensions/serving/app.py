"""The server's answers by HTTP: ``POST /predict`` with JSON, ``GET /health`` and ``GET /metrics``.

200 answer    400 malformed    408 slow to come    413 too large    500 the model failed    503 full    504 too late
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.serving.limits import Limits
from lightning_gnn_dist.extensions.serving.metrics import Metrics
from lightning_gnn_dist.extensions.serving.question import Form, Question, RefusedError
from lightning_gnn_dist.extensions.serving.waiting import FullError, LateError, Waiting

log = logging.getLogger(__name__)
TEXT = "text/plain; version=0.0.4"
RETRY_AFTER = {"Retry-After": "1"}  # seconds


class Answers(Protocol):
    """Answers requests.

    Attributes:
        form: Reads them.
        nodes_at_once: How many nodes are answered at once, at most.
    """

    form: Form
    nodes_at_once: int

    @property
    def about(self) -> dict[str, Any]:
        """What is answered."""
        ...

    def answers(self, asked: Sequence[Question]) -> list[dict[str, Any]]:
        """Return the answer to each request."""
        ...


class _StatusError(Exception):
    """A request that gets no answer, but a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Service:
    """The application.

    Args:
        answerer: Answers requests.
        limits: What the server does at most.
    """

    def __init__(self, answerer: Answers, limits: Limits) -> None:
        self._answerer, self._limits = answerer, limits
        self._waiting = Waiting(self._answers, limits.waiting, limits.seconds, answerer.nodes_at_once)
        self._metrics = Metrics(lambda: len(self._waiting))
        self._waiting.answered = self._metrics.together.add

    def app(self) -> Starlette:
        """Return what a server of ASGI runs."""
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._tell_metrics),
        ]
        refused = {HTTPException: _refuse_address}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=refused)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        answering = asyncio.create_task(self._waiting.run())
        yield
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", **self._answerer.about})

    async def _tell_metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type=TEXT)

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        response = await self._response(request)
        self._metrics.answers[response.status_code] += 1
        if response.status_code == 200:
            self._metrics.seconds.add(time.perf_counter() - begin)
        return response

    async def _response(self, request: Request) -> Response:
        try:
            question = self._answerer.form.read(_parsed(await self._body(request)))
            answer = await self._waiting.ask(question)
            self._metrics.nodes += len(question.nodes)
            return Response(answer, media_type="application/json")
        except RefusedError as error:
            return _refusal(400, str(error))
        except _StatusError as error:
            return _refusal(error.status, str(error))
        except FullError:
            return _refusal(503, f"{self._limits.waiting} requests wait already: ask again later.", RETRY_AFTER)
        except LateError:
            return _refusal(504, f"The request was not answered within {self._limits.seconds:g} s.")
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
                        raise _StatusError(413, f"The body of a request may have {most} bytes: ask several times.")
        except TimeoutError:
            raise _StatusError(408, f"The body did not come within {self._limits.seconds:g} s.") from None
        except ClientDisconnect:
            raise _StatusError(400, "The connection ended before the body.") from None
        return bytes(body)

    def _answers(self, asked: Sequence[Question]) -> list[bytes]:
        """Return answers as they are sent. Runs in a thread."""
        return [json.dumps(answer, allow_nan=False).encode() for answer in self._answerer.answers(asked)]


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
    sentence = f"Ask by POST /predict, GET /health or GET /metrics, got {shown(asked)}."
    return _refusal(error.status_code, sentence, error.headers)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, status, headers)
