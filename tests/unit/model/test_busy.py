"""The load of other programs shows in what the system reports about our threads and the cores."""

import os
from pathlib import Path

import pytest
import torch

from foreword.model import busy
from foreword.model.busy import Waits, others_at_work, read_speed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: seconds that have passed, and seconds that a thread of ours waited for a core."""
    now = [0.0, 0.0]
    monkeypatch.setattr(busy.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(busy, "_waited", lambda: {"1": now[1] / 9, "2": now[1]})
    monkeypatch.setattr(busy, "cores", lambda: 64)
    return now


@pytest.mark.parametrize(("waited", "noticed"), [(0.0, False), (0.1, False), (5.0, True), (7.0, True)])
def test_a_thread_that_waits_for_a_core(waited: float, noticed: bool, clock: list[float]) -> None:
    with Waits() as waits:
        clock[:] = [8.0, waited]
    assert waits.share == pytest.approx(waited / 8) and bool(waits.doubt) is noticed


def test_threads_that_wait_for_each_other_do_not_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "cores", lambda: torch.get_num_threads() - 1)
    with Waits() as waits:
        clock[:] = [8.0, 7.0]
    assert waits.share == 0.0 and not waits.doubt


def test_without_scheduler_statistics_the_time_not_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy.Path, "glob", lambda *_: [])
    monkeypatch.setattr(busy.time, "perf_counter", lambda: 9.0)
    monkeypatch.setattr(busy.time, "thread_time", lambda: 2.0)
    assert busy._waited() == {"": 7.0}


def stat(*cores: tuple[int, int]) -> str:
    """Return a /proc/stat with the busy and idle ticks of each core."""
    lines = [f"cpu{number} {work} 0 0 {idle} 0 0 0 0 0 0" for number, (work, idle) in enumerate(cores)]
    return "\n".join(["cpu 1 2 3 4 5 6 7 8", *lines, "intr 12345 0 9", "ctxt 1"])


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (stat((10, 90), (0, 0)), stat((10, 120), (0, 30)), 0.0),
        (stat((10, 90), (0, 0)), stat((40, 90), (0, 30)), 0.5),
        (stat((10, 90), (0, 0)), stat((40, 90), (30, 0)), 1.0),
    ],
)
def test_the_share_of_the_cores_that_other_programs_use(
    before: str, after: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [before, after]
    monkeypatch.setattr(busy.Path, "read_text", lambda *_, **__: shown.pop(0))
    monkeypatch.setattr(busy.time, "sleep", lambda _: None)
    monkeypatch.setattr(busy.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert others_at_work() == pytest.approx(share)


def test_without_core_ticks_the_load_average_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "_core_ticks", dict)
    monkeypatch.setattr(busy.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 0.0, 0.0), raising=False)
    monkeypatch.setattr(busy, "cores", lambda: 4)
    assert others_at_work() == 0.25


def test_the_read_speed_of_memory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(busy, "BUFFER", 2 * busy.PIECE)
    busy._read_speed.cache_clear()
    found = read_speed(torch.device("cpu"))
    assert found > 1e6
    busy._read_speed.cache_clear()
    monkeypatch.setattr(busy, "_fastest_piece", lambda _: pytest.fail("measured again"))
    assert read_speed(torch.device("cpu")) == found
    busy._read_speed.cache_clear()
