"""A line: messages whole and in order, nobody waits in order to speak, and an end that is gone is noticed."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from foreword.methods.amusd.channel import Channel, SocketChannel, ThreadChannel

Pair = Callable[[], tuple[Channel, Channel]]


def sockets() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return SocketChannel(one), SocketChannel(other)


both = pytest.mark.parametrize("pair", [ThreadChannel.pair, sockets], ids=["threads", "sockets"])


@both
def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    one, other = pair()
    said = [(number, "x" * (number * 997 % 5000)) for number in range(50)]
    for message in said:
        one.send(message)
    acknowledged = []
    while len(acknowledged) < 50:
        one.receive(0.0)  # what did not fit goes on its way
        acknowledged += other.receive(1.0)
    assert acknowledged == said


@both
def test_two_that_speak_at_once_do_not_block_each_other(pair: Pair) -> None:
    """Far more than the system holds, both ways, before anybody listens."""
    one, other = pair()
    load = "y" * 100_000
    for number in range(40):
        one.send((number, load))
        other.send((-number, load))
    ours, theirs = [], []
    while len(ours) < 40 or len(theirs) < 40:
        ours += one.receive(0.0)
        theirs += other.receive(0.0)
    assert [number for number, _ in theirs] == list(range(40)) and [-number for number, _ in ours] == list(range(40))


@both
def test_it_waits_as_long_as_told(pair: Pair) -> None:
    one, other = pair()
    began = time.monotonic()
    assert one.receive(0.05) == [] and not one.closed
    assert 0.04 < time.monotonic() - began < 30
    threading.Timer(0.05, other.send, ["late"]).start()
    assert one.receive(None) == ["late"]


@both
def test_an_end_that_is_gone_is_noticed_and_what_it_said_is_heard(pair: Pair) -> None:
    one, other = pair()
    other.send("last words")
    other.close()
    assert one.receive(None) == ["last words"]
    assert one.receive(None) == [] and one.closed
    one.send("nobody hears this")
    assert one.closed


@both
def test_who_closes_hears_nothing_any_more(pair: Pair) -> None:
    one, other = pair()
    other.send("too late")
    one.close()
    assert one.receive(None) == [] and one.closed
    assert other.receive(None) == [] and other.closed
