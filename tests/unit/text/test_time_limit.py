"""A time limit for code that is not ours: it holds in every thread, and nothing is raised after the work has ended."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from foreword.text.time_limit import TimeIsUp, _Alarm, within


def forever() -> None:
    while True:
        with contextlib.suppress(Exception):
            sum(range(100))


def test_work_that_ends_in_time_is_handed_on() -> None:
    assert within(60, lambda: 5) == 5
    with pytest.raises(KeyError):
        within(60, lambda: {}["a"])


def test_work_that_does_not_end_is_ended_in_any_thread() -> None:
    with pytest.raises(TimeIsUp):
        within(0.05, forever)

    def other() -> str:
        with pytest.raises(TimeIsUp):
            within(0.05, forever)
        return "ended"

    with ThreadPoolExecutor(2) as pool:
        assert [done.result() for done in [pool.submit(other) for _ in range(2)]] == ["ended"] * 2


def test_other_threads_go_on() -> None:
    done: list[int] = []
    other = Thread(target=lambda: done.append(sum(range(10_000_000))))
    other.start()
    with pytest.raises(TimeIsUp):
        within(0.02, forever)
    other.join()
    assert done


def test_an_alarm_at_the_very_end_is_raised_there_or_not_at_all() -> None:
    """Whichever comes first, nothing is left that would strike later."""
    for _ in range(200):
        with contextlib.suppress(TimeIsUp):
            assert within(0.0002, lambda: 5) == 5
    time.sleep(0.05)
    for _ in range(1000):
        sum(range(100))


def test_an_alarm_after_the_end_is_silent() -> None:
    alarm = _Alarm(0)
    alarm.end()
    alarm.ring()
    assert not alarm.rung
