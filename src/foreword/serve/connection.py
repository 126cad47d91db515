"""Connection: uvicorn's HTTP protocol, with the limits that it lacks: how large the head of a request may be, and how long a
client may take to send it.

The head is everything before the body: the first line and the headers. What cannot be read as HTTP gets the same kind of
error as other requests. While an answer is on its way, nothing else is written to its connection.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from foreword.serve.errors import Refusal

HEAD_S = 60.0
LARGEST_HEAD = 1 << 16  # bytes; a part that arrives at once may exceed it
UNREADABLE = "the request is no HTTP that can be read"
TOO_LARGE = f"the head of the request has more than {LARGEST_HEAD} bytes; send fewer and shorter headers"


class Connection(HttpToolsProtocol):
    """One connection to a client."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._heads = self._head_size = 0  # heads so far, and bytes of the one that is not complete
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        heads, was_in_head = self._heads, self._in_head
        super().data_received(data)
        if was_in_head and heads == self._heads and not self.transport.is_closing():
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                self._refuse(Refusal(431, TOO_LARGE, code="head_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._heads, self._head_size, self._in_head = self._heads + 1, 0, False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, UNREADABLE, code="bad_request"))

    def _await_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, unless another answer is on its way, and close the connection."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            answer = refusal.response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            status = b"HTTP/1.1 %d %b" % (refusal.status, HTTPStatus(refusal.status).phrase.encode())
            lines = [status, *(b"%b: %b" % header for header in headers), b"", bytes(answer.body)]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()
