"""A time limit for Python code that is not ours, in whichever thread it runs: `within(seconds, work)`.

Chat templates are programs that come with a model or a request. A timer raises TimeIsUp inside the thread that still works
when its time has passed. It reaches whatever Python executes, such as loops and macros; a single call into C, such as one
huge product, ends first.
"""

import ctypes
from collections.abc import Callable
from threading import Lock, Timer, get_ident
from typing import TypeVar

Found = TypeVar("Found")


class TimeIsUp(BaseException):
    """Not an Exception: code that catches those goes on otherwise."""


class _Alarm:
    """Raises TimeIsUp in one thread, unless that has ended its work."""

    def __init__(self, thread: int) -> None:
        self.thread, self.lock = thread, Lock()
        self.over = self.rung = False

    def ring(self) -> None:
        with self.lock:
            if not self.over:
                self.rung = True
                _raise_in(self.thread, TimeIsUp)

    def end(self) -> None:
        """After this nothing is raised any more: what was on its way is taken back, and raised here."""
        with self.lock:
            self.over = True
            if self.rung:
                _raise_in(self.thread, None)
                raise TimeIsUp


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))


def within(seconds: float, work: Callable[[], Found]) -> Found:
    """What `work` returns; TimeIsUp is raised where it takes longer."""
    alarm = _Alarm(get_ident())
    timer = Timer(seconds, alarm.ring)
    timer.daemon = True
    timer.start()
    try:
        return work()
    finally:
        timer.cancel()
        alarm.end()
