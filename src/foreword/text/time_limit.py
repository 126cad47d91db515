"""A time limit for Python code that is not ours, in whichever thread it runs: `within(seconds, work)`.

Chat templates are programs that come with a model or a request. While one runs, a trace function in its own thread compares
the clock with the deadline before each line, and raises TimeLimitReached there. Nothing is raised from outside: an
asynchronous exception could strike after the work, and on CPython 3.11 even one that is taken back slows the interpreter
down for good. A single call into C, such as one huge product, ends before the limit is checked.
"""

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Found = TypeVar("Found")


class TimeLimitReached(BaseException):
    """Not an Exception, because code that catches those would continue."""


def within(seconds: float, work: Callable[[], Found]) -> Found:
    """Return what `work` returns, or raise TimeLimitReached where it takes longer.

    Under a debugger or a coverage tool, whose trace function is left in place, there is no limit.
    """
    if sys.gettrace() is not None:
        return work()
    deadline = time.monotonic() + seconds

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            raise TimeLimitReached
        return check

    sys.settrace(check)
    try:
        return work()
    finally:
        sys.settrace(None)
