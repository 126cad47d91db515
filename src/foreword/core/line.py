"""Line: one end of a connection between two that work at the same time, in one process or in two.

Messages go out in order and whole, or not at all, and neither side ever waits for the other in order to speak: what the
system does not take at once is kept here and sent later. An end that is closed, or whose process is killed, is noticed by
the other as soon as it listens: `cut`.
"""

from __future__ import annotations

import pickle
import select
import socket
import time
from typing import Any

_HEADER = 4  # bytes that say how long a message is
_PORTION = 1 << 16


class Line:
    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.cut = False
        self._heard, self._unsent = bytearray(), bytearray()

    @staticmethod
    def pair() -> tuple[Line, Line]:
        one, other = socket.socketpair()
        return Line(one), Line(other)

    def say(self, message: Any) -> None:
        data = pickle.dumps(message)
        self._unsent += len(data).to_bytes(_HEADER, "little") + data
        self._send()

    def hear(self, seconds: float | None = 0.0) -> list[Any]:
        """The messages that are there; where there are none, those that come within `seconds`, None being however long."""
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
