"""A time limit for code that is not ours: it holds in every thread, and nothing is left of it after the work has ended."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest

from foreword.text.time_limit import TimeLimitReached, within


def forever() -> None:
    while True:
        with contextlib.suppress(Exception):
            sum(range(100))


def test_work_that_ends_in_time_is_handed_on() -> None:
    assert within(60, lambda: 5) == 5
    with pytest.raises(KeyError):
        within(60, lambda: {}["a"])


def test_work_that_does_not_end_is_ended_in_any_thread() -> None:
    with pytest.raises(TimeLimitReached):
        within(0.05, forever)

    def other() -> str:
        with pytest.raises(TimeLimitReached):
            within(0.05, forever)
        return "ended"

    with ThreadPoolExecutor(2) as pool:
        assert [done.result() for done in [pool.submit(other) for _ in range(2)]] == ["ended"] * 2


def test_other_threads_go_on() -> None:
    done: list[int] = []
    other = Thread(target=lambda: done.append(sum(range(10_000_000))))
    other.start()
    with pytest.raises(TimeLimitReached):
        within(0.02, forever)
    other.join()
    assert done


def test_nothing_is_raised_after_the_work() -> None:
    for _ in range(200):
        with contextlib.suppress(TimeLimitReached):
            assert within(0.0002, lambda: 5) == 5
    assert sys.gettrace() is None
    time.sleep(0.05)
    for _ in range(1000):
        sum(range(100))


def test_a_trace_function_works_after_time_was_up() -> None:
    """On CPython 3.11 an exception that was raised in a thread from outside and taken back makes traced calls hang."""
    with pytest.raises(TimeLimitReached):
        within(0.02, forever)
    lines: list[int] = []

    def note(frame: Any, event: str, argument: Any) -> Any:
        lines.append(frame.f_lineno)
        return note

    sys.settrace(note)
    try:
        assert within(60, lambda: 5) == 5
    finally:
        sys.settrace(None)
    assert lines, "a debugger's own trace function is left in place"
