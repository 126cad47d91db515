"""Server-sent events: chunks as the bytes that go over the wire, and the answer that sends them.

Text is escaped to ASCII: some clients split lines at U+2028 and its like, which JSON would leave as they are.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Send

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

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def write(self, frames: bytes) -> None:
        if frames:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
