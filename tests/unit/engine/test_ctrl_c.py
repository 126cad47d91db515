"""Ctrl-C that is held back: it comes once, when the block has ended, to whoever would have heard it."""

import signal
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from foreword.engine.ctrl_c import HeldBack


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
        with HeldBack():
            ctrl_c()
            done.append("the rest")
        done.append("what follows")
    assert done == ["the rest"]


def test_nothing_comes_where_nothing_came() -> None:
    with HeldBack():
        pass
    with pytest.raises(ValueError, match="its own"), HeldBack():
        raise ValueError("its own")


def test_a_second_one_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldBack():
        ctrl_c()
        done.append("the first waits")
        ctrl_c()
        done.append("the second does not")
    assert done == ["the first waits"]


def test_blocks_within_blocks() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldBack():
        with HeldBack():
            ctrl_c()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_a_handler_of_somebody_else_hears_it_once() -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with HeldBack():
            ctrl_c()
            assert heard == []
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_it_is_ignored_it_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with HeldBack():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_there_is_nothing_to_hold_back() -> None:
    done = []

    def work() -> None:
        with HeldBack():
            done.append(signal.getsignal(signal.SIGINT))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]
