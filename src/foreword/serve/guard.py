"""Guard: what every request passes before its endpoint, as ASGI middleware: its turn, id, key, origin and size.

Some paths are open to requests without a key, such as /health and the page. A web page of another origin may ask only if
the server's options name it: a browser would send its requests to a local server, too.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from dataclasses import dataclass
from hmac import compare_digest
from time import perf_counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.serve.errors import ClientGone, Refusal, refused
from foreword.serve.options import digest

if TYPE_CHECKING:
    from foreword.serve.metrics import Metrics

MOST_TURNS = 4  # requests that begin in one pass of the event loop
MOST_BODIES = 16
BUSY = "the bodies of other requests fill the memory that is meant for them; try again later"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = logging.getLogger("foreword.serve")


class Turns:
    """Let few requests begin in each pass of the event loop, in the order they came. A thousand that come at once would
    otherwise begin in one pass, and hold up everything else for as long. `at_once`: paths that need not wait."""

    def __init__(self, app: ASGIApp, at_once: frozenset[str]) -> None:
        self.app, self._at_once = app, at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = MOST_TURNS  # in this pass

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._at_once:
            await self._turn()
        await self.app(scope, receive, send)

    async def _turn(self) -> None:
        if self._left == MOST_TURNS:
            asyncio.get_running_loop().call_soon(self._next_pass)
        if self._left:
            self._left -= 1
            return
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    def _next_pass(self) -> None:
        self._left = MOST_TURNS
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < MOST_TURNS:
            asyncio.get_running_loop().call_soon(self._next_pass)


@dataclass(frozen=True)
class RequestIds:
    """Give every answer the id of its request, or a new one. Count and log answers. `known`: the paths to count by."""

    app: ASGIApp
    metrics: Metrics
    known: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else f"req-{uuid4().hex}"
        since, path = perf_counter(), scope["path"]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
                self.metrics.answered(path if path in self.known else "other", message["status"])
                log.info(
                    "%s %r %d %.1f ms %s", scope["method"], path, message["status"], (perf_counter() - since) * 1e3, name
                )
            await send(message)

        await self.app(scope, receive, named)


@dataclass(frozen=True)
class Refusals:
    """Turn exceptions into answers, as long as none has begun and the client is there."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except ClientGone:
            return
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            answer = self._answer(error, scope)
            await answer(scope, receive, send)

    def _answer(self, error: Exception, scope: Scope) -> Response:
        refusal = refused(error)
        if refusal.code == "internal_error":
            log.error("%s %r failed", scope["method"], scope["path"], exc_info=error)
        return refusal.response()


@dataclass(frozen=True)
class Keys:
    """Refuse requests without one of the API keys."""

    app: ASGIApp
    digests: tuple[bytes, ...]
    open_paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digests and not (self._is_open(scope) or self._has_key(Headers(scope=scope))):
            headers = {"WWW-Authenticate": "Bearer"}
            message = "this server needs an API key, as in the header `Authorization: Bearer KEY`"
            raise Refusal(401, message, code="invalid_api_key", headers=headers)
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self.open_paths

    def _has_key(self, headers: Headers) -> bool:
        """Compare with all keys, each in constant time, so that the time tells nothing."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip() if kind.lower() == "bearer" else "")
        found = [compare_digest(given, one) for one in self.digests]
        return any(found)


@dataclass(frozen=True)
class Origins:
    """Refuse what web pages of other origins send, unless they are allowed."""

    app: ASGIApp
    allowed: tuple[str, ...]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._allows(origin, headers.get("host", "")):
                raise Refusal(
                    403, "pages of this origin may not ask; allow it with --allow-origin", code="origin_not_allowed"
                )
        await self.app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        if "*" in self.allowed or origin in self.allowed:
            return True
        try:
            return urlsplit(origin).netloc == host
        except ValueError:
            return False


@dataclass
class BodyLimit:
    """Refuse bodies that are too large: by their declared length, or while they come in chunks. And refuse further bytes
    while those of all requests together fill as much memory as `MOST_BODIES` of the largest bodies."""

    app: ASGIApp
    most: int
    held: int = 0  # bytes of requests that have not been answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.most:
            raise self._refusal()
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            arrived = len(message.get("body", b""))
            size += arrived
            self.held += arrived
            if size > self.most:
                raise self._refusal()
            if self.held > MOST_BODIES * self.most:
                raise Refusal(503, BUSY, headers={"Connection": "close", "Retry-After": "5"})
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.held -= size

    def _refusal(self) -> Refusal:
        message = f"the body is larger than {self.most} bytes; send less, or start the server with a larger --max-body"
        return Refusal(413, message, headers={"Connection": "close"})
