"""FrameSocket: messages as frames over a socket, for the engine's side, which must never wait while requests run.

What is sent goes to the socket as far as it takes it; the rest follows with the next messages. Only if the other side has
left megabytes unread does a send wait: the engine must not write more than its clients can read.
"""

from __future__ import annotations

import select
import socket

from foreword.serve.messages import LENGTH

READ_SIZE = 1 << 16
MOST_UNSENT = 16 << 20  # bytes


class Closed(Exception):
    """The other side has gone."""


class FrameSocket:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.setblocking(False)
        self._unread = bytearray()
        self._unsent = bytearray()

    def received(self, wait: float | None = 0.0) -> list[bytes]:
        """Return the bodies of all complete frames that have arrived. If there are none, wait that many seconds for some;
        None: without end."""
        self._flush()
        bodies = self._bodies()
        if not bodies and wait != 0.0:
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), wait)
            bodies = self._bodies()
        return bodies

    def _bodies(self) -> list[bytes]:
        """Read what has arrived, and cut complete frames off."""
        try:
            while found := self.socket.recv(READ_SIZE):
                self._unread += found
            raise Closed
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionError as error:
            raise Closed from error
        bodies, start = [], 0
        while len(self._unread) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._unread, start)
            stop = start + LENGTH.size + size
            if stop > len(self._unread):
                break
            bodies.append(bytes(self._unread[start + LENGTH.size : stop]))
            start = stop
        del self._unread[:start]
        return bodies

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        self._unsent += frame
        self._flush()
        while len(self._unsent) > MOST_UNSENT:
            self._wait(select.POLLOUT)
            self._flush()

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._unsent:
            self._wait(select.POLLOUT)
            self._flush()

    def _wait(self, events: int, seconds: float | None = None) -> None:
        """Wait for one of some events. Not by `select`, which fails for descriptors above 1023: a server that starts its
        engine again may have as many clients."""
        waiting = select.poll()
        waiting.register(self.socket, events)
        waiting.poll(None if seconds is None else seconds * 1000)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionError as error:
            raise Closed from error
