"""A line: messages whole and in order, nobody waits in order to speak, and an end that is gone is noticed."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from foreword.methods.amusd.channel import Line, SocketLine, ThreadLine

Pair = Callable[[], tuple[Line, Line]]


def sockets() -> tuple[Line, Line]:
    one, other = socket.socketpair()
    return SocketLine(one), SocketLine(other)


both = pytest.mark.parametrize("pair", [ThreadLine.pair, sockets], ids=["threads", "sockets"])


@both
def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    one, other = pair()
    said = [(number, "x" * (number * 997 % 5000)) for number in range(50)]
    for message in said:
        one.say(message)
    heard = []
    while len(heard) < 50:
        one.hear(0.0)  # what did not fit goes on its way
        heard += other.hear(1.0)
    assert heard == said


@both
def test_two_that_speak_at_once_do_not_block_each_other(pair: Pair) -> None:
    """Far more than the system holds, both ways, before anybody listens."""
    one, other = pair()
    load = "y" * 100_000
    for number in range(40):
        one.say((number, load))
        other.say((-number, load))
    ours, theirs = [], []
    while len(ours) < 40 or len(theirs) < 40:
        ours += one.hear(0.0)
        theirs += other.hear(0.0)
    assert [number for number, _ in theirs] == list(range(40)) and [-number for number, _ in ours] == list(range(40))


@both
def test_it_waits_as_long_as_told(pair: Pair) -> None:
    one, other = pair()
    began = time.monotonic()
    assert one.hear(0.05) == [] and not one.cut
    assert 0.04 < time.monotonic() - began < 30
    threading.Timer(0.05, other.say, ["late"]).start()
    assert one.hear(None) == ["late"]


@both
def test_an_end_that_is_gone_is_noticed_and_what_it_said_is_heard(pair: Pair) -> None:
    one, other = pair()
    other.say("last words")
    other.close()
    assert one.hear(None) == ["last words"]
    assert one.hear(None) == [] and one.cut
    one.say("nobody hears this")
    assert one.cut


@both
def test_who_closes_hears_nothing_any_more(pair: Pair) -> None:
    one, other = pair()
    other.say("too late")
    one.close()
    assert one.hear(None) == [] and one.cut
    assert other.hear(None) == [] and other.cut
