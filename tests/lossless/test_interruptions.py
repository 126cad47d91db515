"""Ctrl-C may come between any two lines. Whatever was being written is given up, and what is asked next is the truth."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import foreword
from doubles import SAMPLINGS, drafter, engine, requests, target, truth, written
from foreword.methods import METHODS

SOURCE = str(Path(foreword.__file__).parent)
Line = tuple[str, int]


class CtrlC:
    """Notes the lines of ours that are come to, and interrupts before one of them, at its first visit or a later one."""

    def __init__(self, before: Line | None = None, visit: int = 1) -> None:
        self.before, self.visit = before, visit
        self.lines: list[Line] = []

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.at if frame.f_code.co_filename.startswith(SOURCE) else None

    def at(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if self.lines[-1] == self.before and self.lines.count(self.before) == self.visit:
                raise KeyboardInterrupt  # which also ends the tracing
        return self.at

    @contextmanager
    def watching(self) -> Iterator[None]:
        found = sys.gettrace()
        sys.settrace(self.enter)
        try:
            yield
        finally:
            sys.settrace(found)


def interrupted_and_asked_again(method: str, late: bool, choose: Callable[[list[Line]], list[CtrlC]]) -> None:
    """Three texts for two slots, interrupted where `choose` says; then the same again, from what the slots hold of them."""
    model, asked = target(), requests(3, SAMPLINGS["T=0.8"], max_new_tokens=3)
    again = [replace(request, reuse=True) for request in asked]
    expected = [truth(model.hf, request) for request in asked]
    steps, whole = engine(drafter(method, model), model, slots=2, late=late), CtrlC()
    assert written(steps, asked) == expected  # what happens only once is over
    with whole.watching():
        assert written(steps, asked) == expected
    for ctrl_c in choose(whole.lines):
        with pytest.raises(KeyboardInterrupt), ctrl_c.watching():
            steps.generate(asked)
        assert not steps.busy and len(steps.slots.left) == 2, ctrl_c.before
        assert written(steps, again) == expected, ctrl_c.before


at_once_or_late = pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])


@at_once_or_late
def test_before_any_line_that_seats_a_text_or_lets_it_go(late: bool) -> None:
    def choose(lines: list[Line]) -> list[CtrlC]:
        seating = [line for line in sorted(set(lines)) if line[0].endswith(("engine.py", "admit.py", "sampling.py"))]
        assert len(seating) > 100
        return [CtrlC(before=line) for line in seating]

    interrupted_and_asked_again("plain", late, choose)


@at_once_or_late
@pytest.mark.parametrize("method", METHODS)
def test_before_some_lines_of_a_method(method: str, late: bool) -> None:
    def choose(lines: list[Line]) -> list[CtrlC]:
        some = Random(method).choices(lines, k=3)
        return [CtrlC(line, visit=-(-lines.count(line) // 2)) for line in some]

    interrupted_and_asked_again(method, late, choose)
