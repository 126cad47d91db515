"""Line: one end of a connection between two that work at the same time, in one process or in two.

Messages go out in order and whole, or not at all, and neither side ever waits for the other in order to speak. An end that
is closed, or whose process is killed, is noticed by the other as soon as it listens: `cut`.
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


class Line(Protocol):
    cut: bool

    def say(self, message: Any) -> None:
        """Where the other end is gone, to nobody."""

    def hear(self, seconds: float | None = 0.0) -> list[Any]:
        """The messages that are there; where there are none, those that come within `seconds`, None being however long."""

    def close(self) -> None:
        """This end is gone."""


_LAST = object()


class ThreadLine:
    """Between two threads. What is said is there at once, and to speak or to look nobody lets go of the interpreter: whoever
    does waits until the other thread lets go of it in turn."""

    def __init__(self, ours: SimpleQueue[Any], theirs: SimpleQueue[Any]) -> None:
        self._ours, self._theirs = ours, theirs
        self.cut = False

    @staticmethod
    def pair() -> tuple[ThreadLine, ThreadLine]:
        one: SimpleQueue[Any] = SimpleQueue()
        other: SimpleQueue[Any] = SimpleQueue()
        return ThreadLine(one, other), ThreadLine(other, one)

    def say(self, message: Any) -> None:
        self._theirs.put(message)

    def hear(self, seconds: float | None = 0.0) -> list[Any]:
        found: list[Any] = []
        try:
            message = None if self.cut else self._ours.get(seconds != 0, seconds)
            while not self.cut:
                self.cut = message is _LAST
                found += [] if self.cut else [message]
                message = self._ours.get_nowait()
        except Empty:
            pass  # that was all for now
        return found

    def close(self) -> None:
        self.cut = True
        self._theirs.put(_LAST)


class SocketLine:
    """Between two processes. What the system does not take at once is kept here and sent later."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.cut = False
        self._heard, self._unsent = bytearray(), bytearray()

    def say(self, message: Any) -> None:
        data = pickle.dumps(message)
        self._unsent += len(data).to_bytes(_HEADER, "little") + data
        self._send()

    def hear(self, seconds: float | None = 0.0) -> list[Any]:
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            self._send()
            self._receive()
            found = self._whole()
            left = None if until is None else until - time.monotonic()
            if found or self.cut or (left is not None and left <= 0):
                return found
            self._sleep(left)

    def close(self) -> None:
        self.cut = True
        self.end.close()

    def _sleep(self, seconds: float | None) -> None:
        """Until something came, or something can go, or the time is up."""
        poll = select.poll()
        poll.register(self.end, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(None if seconds is None else max(seconds * 1000, 0.05))

    def _send(self) -> None:
        try:
            while self._unsent and not self.cut:
                del self._unsent[: self.end.send(self._unsent[:_PORTION])]
        except BlockingIOError:
            pass  # later: the other side has yet to listen
        except OSError:
            self.cut = True

    def _receive(self) -> None:
        try:
            while not self.cut:
                portion = self.end.recv(_PORTION)
                self._heard += portion
                self.cut = not portion
        except BlockingIOError:
            pass  # that was all for now
        except OSError:
            self.cut = True

    def _whole(self) -> list[Any]:
        found = []
        while len(self._heard) >= _HEADER:
            stop = _HEADER + int.from_bytes(self._heard[:_HEADER], "little")
            if len(self._heard) < stop:
                break
            found.append(pickle.loads(self._heard[_HEADER:stop]))
            del self._heard[:stop]
        return found
