"""Delayed Ctrl-C: it arrives once, when the block has ended, at the handler that was set before."""

import signal
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from foreword.engine.ctrl_c import DelayedCtrlC


@pytest.fixture(autouse=True)
def handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_comes_when_the_block_has_ended() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with DelayedCtrlC():
            ctrl_c()
            done.append("the rest")
        done.append("what follows")
    assert done == ["the rest"]


def test_without_ctrl_c_nothing_is_raised() -> None:
    with DelayedCtrlC():
        pass
    with pytest.raises(ValueError, match="its own"), DelayedCtrlC():
        raise ValueError("its own")


def test_a_second_one_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedCtrlC():
        ctrl_c()
        done.append("the first waits")
        ctrl_c()
        done.append("the second does not")
    assert done == ["the first waits"]


def test_blocks_within_blocks() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), DelayedCtrlC():
        with DelayedCtrlC():
            ctrl_c()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_another_handler_is_called_once() -> None:
    calls: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with DelayedCtrlC():
            ctrl_c()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DelayedCtrlC():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_changes_no_handler() -> None:
    done = []

    def work() -> None:
        with DelayedCtrlC():
            done.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]
