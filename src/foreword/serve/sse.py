"""Server-sent events: chunks as the bytes that go over the wire, and the answer that sends them.

Text is escaped to ASCII: some clients split lines at U+2028 and its like, which JSON would leave as they are.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

from starlette.types import Message, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
)

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def data(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as an event."""
    return b"data: %b\n\n" % _encode(chunk).encode()


def named(chunk: dict[str, Any]) -> bytes:
    """Return a chunk as an event whose name is its type."""
    return b"event: %b\n%b" % (chunk["type"].encode(), data(chunk))


class EventStream:
    """The answer of a stream. Its status goes out with the first bytes; after that, errors are events too."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __aenter__(self) -> Self:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            await self._send({"type": "http.response.body", "body": b""})

    async def write(self, frames: bytes) -> None:
        if not frames:
            return
        message: Message = {"type": "http.response.body", "body": frames, "more_body": True}
        await self._send(message)
