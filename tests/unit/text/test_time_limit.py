"""A time limit for code that is not ours: it holds in every thread, and nothing is left of it after the work has ended."""

import contextlib
import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest

from foreword.text.time_limit import TimeLimitReached, within

HERE = (__file__,)


def forever() -> None:
    while True:
        with contextlib.suppress(Exception):
            sum(range(100))


def test_work_that_ends_in_time_is_handed_on() -> None:
    assert within(60, lambda: 5, HERE) == 5
    with pytest.raises(KeyError):
        within(60, lambda: {}["a"], HERE)


def test_work_that_does_not_end_is_ended_in_any_thread() -> None:
    with pytest.raises(TimeLimitReached):
        within(0.05, forever, HERE)

    def other() -> str:
        with pytest.raises(TimeLimitReached):
            within(0.05, forever, HERE)
        return "ended"

    with ThreadPoolExecutor(2) as pool:
        assert [done.result() for done in [pool.submit(other) for _ in range(2)]] == ["ended"] * 2


def test_other_threads_go_on() -> None:
    done: list[int] = []
    other = Thread(target=lambda: done.append(sum(range(10_000_000))))
    other.start()
    with pytest.raises(TimeLimitReached):
        within(0.02, forever, HERE)
    other.join()
    assert done


def test_nothing_is_raised_after_the_work() -> None:
    traced = sys.gettrace()
    for _ in range(200):
        with contextlib.suppress(TimeLimitReached):
            assert within(0.0002, lambda: 5, HERE) == 5
    assert sys.gettrace() is traced
    time.sleep(0.05)
    for _ in range(1000):
        sum(range(100))


def test_a_trace_function_works_after_time_was_up() -> None:
    """On CPython 3.11 an exception that was raised in a thread from outside and taken back makes traced calls hang."""
    with pytest.raises(TimeLimitReached):
        within(0.02, forever, HERE)
    lines: list[int] = []

    def note(frame: Any, event: str, argument: Any) -> Any:
        lines.append(frame.f_lineno)
        return note

    def traced() -> None:
        lines.clear()

    others = sys.gettrace()
    sys.settrace(note)
    try:
        with pytest.raises(TimeLimitReached):
            within(0.02, forever, HERE)
        traced()
    finally:
        sys.settrace(others)
    assert lines, "a debugger's own trace function is back after the work"


ELSEWHERE: dict[str, Any] = {}
exec(compile("""
def forever_with_callbacks(seconds):
    import gc, time
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        gc.collect(0)
        Finalised()
""", "<template>", "exec"), ELSEWHERE)  # fmt: skip


def test_nothing_is_raised_in_code_that_happens_to_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in callbacks of the garbage collector and in finalisers is printed and lost, and the limit with it."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    entered: list[str] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        for _ in range(200):
            entered.append(phase)

    class Finalised:
        def __del__(self) -> None:
            for _ in range(200):
                entered.append("del")

    ELSEWHERE["Finalised"] = Finalised
    gc.callbacks.append(callback)
    try:
        for limit in range(20):
            began = time.monotonic()
            with pytest.raises(TimeLimitReached):
                within(0.002 + limit / 10_000, lambda: ELSEWHERE["forever_with_callbacks"](5), ("<template>",))
            assert time.monotonic() - began < 2
    finally:
        gc.callbacks.remove(callback)
    assert not lost and {"start", "stop", "del"} <= set(entered)


def test_time_that_other_code_took_counts() -> None:
    with pytest.raises(TimeLimitReached):
        within(0.01, lambda: time.sleep(0.05), ("<template>",))
