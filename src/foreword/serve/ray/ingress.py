"""Ingress: what every request passes in Ray's proxy, as ASGI middleware, before a replica is chosen for it.

A request of a session gets the header by which the proxy routes, also if the session's name is in its body. What the proxy
itself answers, such as that a queue is full, becomes an error with OpenAI's body. A stream whose replica died ends with an
error event. Ray calls `middlewares`: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it. Torch is not imported here.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.serve import sse
from foreword.serve.errors import RETRY_S, ClientGone, Refusal
from foreword.serve.guard import BodyLimit, Refusals
from foreword.serve.options import ServeOptions

SESSION, RESPONSES = "x-session-id", "/v1/responses"
CALLBACK = "foreword.serve.ray.ingress:middlewares"
MAX_BODY_VARIABLE = "FOREWORD_MAX_BODY"
BODY_S = 60.0  # a client that needs longer to send a body only keeps a connection busy
LOST = "the replica that answered has ended; send the request again"


class SessionField(msgspec.Struct):
    """The field of a body that names its session."""

    prompt_cache_key: str | None = None


def middlewares() -> list[Middleware]:
    """Return the middleware of the proxy, the innermost first."""
    most = int(os.environ.get(MAX_BODY_VARIABLE, ServeOptions.max_body))
    return [Middleware(Ingress), Middleware(BodyLimit, most=most), Middleware(Refusals)]


def session_of(body: bytes) -> str | None:
    """Return the session that a body names. A body that cannot be read is the replica's to refuse."""
    try:
        return msgspec.json.decode(body, type=SessionField).prompt_cache_key
    except (msgspec.DecodeError, RecursionError):
        return None


@dataclass(frozen=True)
class Ingress:
    """Reads the body of a request, adds its session to its head, and sees to it that its answer is complete."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "POST":
            body = await _body(receive)
            receive = _again(body, receive)
            if (session := session_of(body)) is not None:  # it wins over the header, as in a server
                MutableHeaders(scope=scope)[SESSION] = session.encode("ascii", "backslashreplace").decode()
        answer = ProxiedAnswer(send, has_named_events=scope["path"] == RESPONSES)
        await self.app(scope, receive, answer.take)
        await answer.complete()


async def _body(receive: Receive) -> bytes:
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                found += message.get("body", b"")
                if not message.get("more_body", False):
                    return bytes(found)
    except TimeoutError as error:
        raise Refusal(408, f"the body took longer than {BODY_S:g} s", headers={"Connection": "close"}) from error


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read already."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


class ProxiedAnswer:
    """The answer to one request, on its way to the client."""

    def __init__(self, send: Send, has_named_events: bool) -> None:
        self._send, self._has_named_events = send, has_named_events
        self._start: Message | None = None
        self._is_stream = self._is_complete = False
        self._said: bytearray | None = None  # the body of an error of the proxy

    async def take(self, message: Message) -> None:
        """Pass on a message of a replica. Keep those of an error that the proxy makes itself: its body is plain text."""
        if message["type"] == "http.response.start":
            self._start, headers = message, MutableHeaders(scope=message)
            kind = headers.get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            if message["status"] >= 400 and not kind.startswith("application/json"):
                self._said = bytearray()
                return
            if "x-request-id" in headers:
                headers["x-request-id"] = headers["x-request-id"]  # once: replica and proxy add it
        elif self._said is not None:
            self._said += message.get("body", b"")
            return
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def complete(self) -> None:
        """Say that the answer failed, if it did: as an answer, or as the last event of a stream."""
        if self._start is None:
            await self._refuse(Refusal(503, LOST, code="replica_lost", headers={"Retry-After": str(RETRY_S)}))
        elif self._said is not None:
            await self._refuse(_refusal(self._start["status"], Headers(scope=self._start), bytes(self._said)))
        elif self._is_stream and not self._is_complete:
            content = Refusal(503, LOST, code="replica_lost").content()
            event = (
                sse.named({**content["error"], **content, "type": "error"}) if self._has_named_events else sse.data(content)
            )
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _refuse(self, refusal: Refusal) -> None:
        answer = refusal.response()
        await self._send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})


def _refusal(status: int, headers: Headers, said: bytes) -> Refusal:
    """Return an error of the proxy as one of ours."""
    retry = {"Retry-After": headers.get("retry-after", str(RETRY_S))}
    if status == 404:  # all paths are ours: there is no application
        return Refusal(503, "the replicas start or stop; try again in a moment", code="unavailable", headers=retry)
    if status == 429:
        return Refusal(429, "all replicas are busy, and as many requests wait as may; try again later", headers=retry)
    return Refusal(status, said.decode(errors="replace"), headers=retry if status == 503 else None)
