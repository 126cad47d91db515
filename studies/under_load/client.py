"""A cheap HTTP client for thousands of streams: one protocol object per connection, parsed in C.

In: the bytes of a request, and what the client does to it. Out: an `Answer`: status, body, and when its first event came.
A client may vanish: in the middle of its body, after a while, or when a condition on the answer holds.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

Address = tuple[str, int]
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST at once


@dataclass
class Answer:
    """What came back. `status`: 0 if nothing did. `complete`: to its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    events: int = 0
    first_s: float | None = None  # from the request to the first event that has a token
    seconds: float = 0.0


@dataclass(frozen=True)
class Vanish:
    """How a client leaves before its answer is complete. `sent`: the share of the request that it sends. `after_s`: it
    leaves so long after that. `when`: it leaves when this holds. `resets`: by RST, else by FIN."""

    sent: float = 1.0
    after_s: float | None = None
    when: Callable[[Answer], bool] | None = None
    resets: bool = False


class Connection(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, request: bytes, vanish: Vanish | None) -> None:
        self.answer, self._request, self._vanish = Answer(), request, vanish
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Answer] = self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._since = time.perf_counter()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, vanish = transport, self._vanish
        transport.write(self._request if vanish is None else self._request[: int(len(self._request) * vanish.sent)])
        if vanish is not None and vanish.after_s is not None:
            self._timer = self._loop.call_later(vanish.after_s, self.leave)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.leave()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        answer = self.answer
        answer.body += body
        answer.events += body.count(b"data: ")
        if answer.first_s is None and b'"token_ids":[' in body:
            answer.first_s = time.perf_counter() - self._since
        if self._vanish is not None and self._vanish.when is not None and self._vanish.when(answer):
            self.leave()

    def on_message_complete(self) -> None:
        self.answer.complete = True
        self.leave()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def leave(self) -> None:
        """Close the connection."""
        if self.ended.done():
            return
        if self._vanish is not None and self._vanish.resets and not self.answer.complete:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._transport.abort()
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.done():
            self.answer.seconds = time.perf_counter() - self._since
            self.ended.set_result(self.answer)


async def ask(address: Address, request: bytes, vanish: Vanish | None = None) -> Answer:
    """Send a request on a connection of its own, and return what came back when the connection has ended."""
    try:
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(request, vanish), *address)
    except ConnectionError:  # the server reset it before it was made
        return Answer()
    try:
        return await connection.ended
    finally:
        connection.leave()


def posted(path: str, body: Any, keep_alive: bool = False, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a request with a JSON body. `headers`: in addition to those that it needs."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = b"keep-alive" if keep_alive else b"close"
    head = (
        b"POST %b HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nConnection: %b\r\nContent-Length: %d\r\n\r\n"
    )
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
    return head[:-2] % (path.encode(), connection, len(content)) + more + b"\r\n" + content


def got(path: str) -> bytes:
    """Return a request without a body."""
    return b"GET %b HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n" % path.encode()
