"""A time limit for Python code that is not ours, in whichever thread it runs: `within(seconds, work, files)`.

Chat templates are programs that come with a model or a request. While one runs, a trace function in its own thread compares
the clock with the deadline before each line of the named files, and raises TimeLimitReached there. Nothing is raised from
outside: an asynchronous exception could strike after the work, and on CPython 3.11 even one that is taken back slows the
interpreter down for good. Nothing is raised in other files either: a callback of the garbage collector or a `__del__` may
run at any line, and there an exception is printed and lost. A single call into C ends before the limit is checked.
"""

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Found = TypeVar("Found")


class TimeLimitReached(BaseException):
    """Not an Exception, because code that catches those would continue."""


def within(seconds: float, work: Callable[[], Found], files: tuple[str, ...]) -> Found:
    """Return what `work` returns, or raise TimeLimitReached where it takes longer. `files`: names of files, or beginnings of
    them; code of other files is not interrupted, but does not hide that the time has passed.

    The trace function of a debugger or a coverage tool rests meanwhile.
    """
    deadline = time.monotonic() + seconds
    interrupted: dict[str, bool] = {}

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in interrupted:
            interrupted[file] = file.startswith(files)
        if not interrupted[file]:
            return None
        if time.monotonic() > deadline:
            raise TimeLimitReached
        return check

    others = sys.gettrace()
    sys.settrace(check)
    try:
        found = work()
    finally:
        sys.settrace(others)
    if time.monotonic() > deadline:
        raise TimeLimitReached
    return found
