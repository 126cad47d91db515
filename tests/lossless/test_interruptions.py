"""Ctrl-C may come before any line, and a step may break at any. The output of other and of later requests stays that of
plain decoding."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import getsourcelines
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import foreword
from doubles import SAMPLINGS, drafter, engine, requests, run_to_end, target_for, truth, written
from foreword.engine.admit import Slots
from foreword.engine.eager import EagerLoop
from foreword.engine.engine import Engine
from foreword.methods import METHODS
from foreword.model.cache import SlotCache
from foreword.model.stack import Stack

SOURCE = str(Path(foreword.__file__).parent)
Line = tuple[str, int]
STEPS = tuple(f"engine/{name}.py" for name in ("engine", "admit", "prefill", "emit"))


class Before:
    """Records the lines of the package that run, and calls `act` before the first run of one of them."""

    def __init__(self, line: Line | None = None, act: Callable[[], None] = lambda: None) -> None:
        self.line, self.act = line, act
        self.lines: set[Line] = set()

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.at if frame.f_code.co_filename.startswith(SOURCE) else None

    def at(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in self.lines:
            self.lines.add(line)
            if line == self.line:
                self.act()
        return self.at

    @contextmanager
    def watching(self) -> Iterator[None]:
        found = sys.gettrace()
        handler = signal.getsignal(signal.SIGINT)
        sys.settrace(self.enter)
        try:
            yield
        finally:
            sys.settrace(found)
            assert signal.getsignal(signal.SIGINT) is handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def broken() -> None:
    raise MemoryError


ASKED = requests(4, SAMPLINGS["T=0.8"], max_new_tokens=3)
AGAIN = [replace(request, reuse=True) for request in ASKED]


@cache
def expected(method: str) -> list[list[int]]:
    return [truth(target_for(method).hf, request) for request in ASKED]


def lines_of(steps: Engine) -> list[Line]:
    """The lines of the package that run whenever those requests are generated."""
    found = []
    for _ in range(3):  # lines that run only once are over after the first
        watched = Before()
        with watched.watching():
            steps.generate(ASKED[:3])
        found.append(watched.lines)
    return sorted(found[1] & found[2])


def ctrl_c_before(line: Line, steps: Engine, method: str = "plain") -> bool:
    """Three requests are interrupted, next to a fourth of another caller; then all are generated again."""
    fourth, interrupted = steps.add(ASKED[3]), False
    try:
        with Before(line, ctrl_c).watching():
            steps.generate(ASKED[:3])
    except KeyboardInterrupt:
        interrupted = True
    run_to_end(steps)
    assert fourth.tokens == expected(method)[3], line
    assert len(steps.slots.free) == steps.slots.count, line
    assert written(steps, AGAIN) == expected(method), line
    return interrupted


def steps_of(method: str, late: bool) -> Engine:
    model = target_for(method)
    return engine(drafter(method, model), target_for(method), slots=3, late=late)


def test_ctrl_c_before_any_line_of_a_step() -> None:
    steps = steps_of("plain", late=True)
    lines = [line for line in lines_of(steps) if line[0].endswith(STEPS)]
    assert len(lines) > 150
    assert all(ctrl_c_before(line, steps) for line in lines)


@pytest.mark.parametrize(("number", "method"), enumerate(METHODS), ids=METHODS)
def test_ctrl_c_before_some_lines_of_a_method(number: int, method: str) -> None:
    """Which lines run again may depend on a draft in another thread. Every other method is read a round late."""
    steps = steps_of(method, late=bool(number % 2))
    lines = Random(method).sample(lines_of(steps), 6)
    assert sum(ctrl_c_before(line, steps, method) for line in lines) >= 2


def test_a_step_that_breaks_before_any_line_aborts_all_requests() -> None:
    """For lack of memory, perhaps, or by a second Ctrl-C."""
    steps = steps_of("plain", late=True)
    for line in [line for line in lines_of(steps) if line[0].endswith(STEPS)][::2]:
        fourth = steps.add(ASKED[3])
        with pytest.raises(MemoryError), Before(line, broken).watching():
            steps.generate(ASKED[:3])
        run_to_end(steps)
        assert fourth.finish_reason == "abort" or fourth.tokens == expected("plain")[3], line
        assert len(steps.slots.free) == steps.slots.count, line
        assert written(steps, AGAIN) == expected("plain"), line


SAMPLES = [replace(ASKED[1], sampling=SAMPLINGS["greedy"], max_new_tokens=12, reuse=True) for _ in range(4)]
COPIES = (Slots.take, EagerLoop.copy, SlotCache.copy, Stack.copy)


def lines_in(function: Callable[..., Any]) -> set[Line]:
    lines, first = getsourcelines(function)
    return {(function.__code__.co_filename, first + place) for place in range(len(lines))}


def test_a_step_that_breaks_before_a_copy_leaves_no_rows_that_were_not_copied() -> None:
    """The slots hold rows of other sequences, which the prompt must not start from."""
    steps = steps_of("draft_model", late=True)
    true = [truth(steps.target.hf, request) for request in SAMPLES]
    watched = Before()
    with watched.watching():
        runs = steps.generate(SAMPLES)
    assert any(run.reused for run in runs[:3])
    ways = [watched.lines & lines_in(function) for function in COPIES]
    assert all(ways)
    for line in sorted(set.union(*ways)):
        steps.slots.forget()
        with pytest.raises(MemoryError), Before(line, broken).watching():
            steps.generate(SAMPLES)
        run_to_end(steps)
        assert written(steps, SAMPLES) == true, line
        written(steps, [ASKED[2]] * 3)
