"""Channel: one end of a connection between two workers that run at the same time, in one process or in two.

Messages arrive in order and whole, or not at all. Sending never waits for the other side. If an end is closed, or its
process is killed, the other side sees it as soon as it receives: `closed`.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from queue import Empty, SimpleQueue
from typing import Any, Protocol

_HEADER = 4  # bytes that say how long a message is
_PORTION = 1 << 16


class Channel(Protocol):
    closed: bool

    def send(self, message: Any) -> None:
        """Send a message. If the other end is gone, it is lost."""

    def receive(self, seconds: float | None = 0.0) -> list[Any]:
        """Return the messages that are there. If there are none, wait up to `seconds` for some; None: without a limit."""

    def close(self) -> None:
        """Close this end."""


_LAST = object()


class ThreadChannel:
    """Between two threads. Messages arrive at once. Sending and looking do not release the interpreter lock: a thread that
    releases it waits until the other one releases it in turn."""

    def __init__(self, ours: SimpleQueue[Any], theirs: SimpleQueue[Any]) -> None:
        self._ours, self._theirs = ours, theirs
        self.closed = False

    @staticmethod
    def pair() -> tuple[ThreadChannel, ThreadChannel]:
        one: SimpleQueue[Any] = SimpleQueue()
        other: SimpleQueue[Any] = SimpleQueue()
        return ThreadChannel(one, other), ThreadChannel(other, one)

    def send(self, message: Any) -> None:
        self._theirs.put(message)

    def receive(self, seconds: float | None = 0.0) -> list[Any]:
        found: list[Any] = []
        try:
            message = None if self.closed else self._ours.get(seconds != 0, seconds)
            while not self.closed:
                self.closed = message is _LAST
                found += [] if self.closed else [message]
                message = self._ours.get_nowait()
        except Empty:
            pass  # that was all for now
        return found

    def close(self) -> None:
        self.closed = True
        self._theirs.put(_LAST)


class SocketChannel:
    """Between two processes. What the system does not take at once is kept and sent later."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.closed = False
        self._received, self._unsent = bytearray(), bytearray()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        self._unsent += len(data).to_bytes(_HEADER, "little") + data
        self._flush()

    def receive(self, seconds: float | None = 0.0) -> list[Any]:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self._flush()
            self._read_socket()
            found = self._messages()
            left = None if until is None else until - time.monotonic()
            if found or self.closed or (left is not None and left <= 0):
                return found
            self._sleep(left)

    def close(self) -> None:
        self.closed = True
        self.end.close()

    def _sleep(self, seconds: float | None) -> None:
        """Wait until something can be read or sent, or the time is up."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if seconds is None else max(seconds * 1000, 0.05))

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                del self._unsent[: self.end.send(self._unsent[:_PORTION])]
        except BlockingIOError:
            pass  # later: the other side has not read yet
        except OSError:
            self.closed = True

    def _read_socket(self) -> None:
        try:
            while not self.closed:
                portion = self.end.recv(_PORTION)
                self._received += portion
                self.closed = not portion
        except BlockingIOError:
            pass  # that was all for now
        except OSError:
            self.closed = True

    def _messages(self) -> list[Any]:
        found = []
        while len(self._received) >= _HEADER:
            stop = _HEADER + int.from_bytes(self._received[:_HEADER], "little")
            if len(self._received) < stop:
                break
            found.append(pickle.loads(self._received[_HEADER:stop]))
            del self._received[:stop]
        return found
