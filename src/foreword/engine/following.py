"""Follow the first rank: do what it orders until it closes the model. This is all that the other ranks do."""

from __future__ import annotations

import signal
from threading import current_thread, main_thread
from typing import Any, Protocol

from foreword.engine.engine import Engine
from foreword.engine.orders import Close, Step, Switch, WarmUp, digest, unpacked
from foreword.engine.request import Running
from foreword.errors import EngineError, ForewordError
from foreword.ranks.links import Links
from foreword.text import Tokenizer


class Host(Protocol):
    """What has the engine of a rank."""

    tokenizer: Tokenizer

    @property
    def engine(self) -> Engine: ...

    def switch(self, drafter_request: Any) -> None:
        """Switch to another method, or raise an error and keep the current one."""


def follow(host: Host, links: Links) -> None:
    """Follow the first rank. Return when it closes the model, or ends in order."""
    if current_thread() is main_thread():  # Ctrl-C in a terminal reaches all ranks, and is the first one's to handle
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    known: dict[int, Running] = {}
    while True:
        try:
            order = unpacked(links.receive_bytes(), host.tokenizer)
        except EOFError:
            return
        try:
            match order:
                case Step():
                    _step(host.engine, order, known)
                case WarmUp(shortest, longest, sampling):
                    host.engine.warm_up(shortest, longest, sampling)
                case Switch(drafter_request):
                    _switch(host, drafter_request)
                case Close():
                    return
        except BaseException as error:
            links.fail(f"{type(error).__name__}: {error}")
            raise
        known = {number: running for number, running in known.items() if not running.done}


def _step(engine: Engine, order: Step, known: dict[int, Running]) -> None:
    if digest(engine.slots.running.values()) != order.decided:
        raise EngineError("it decided other tokens than rank 0, so the ranks do not compute the same; report this")
    for number, request in order.arrived.items():
        known[number] = engine.checked(request)
        engine.queue([known[number]])
    if order.aborted:
        engine.abort(*(known[number] for number in order.aborted if number in known))
    if order.rounds:
        engine.advance(order.rounds)


def _switch(host: Host, drafter_request: Any) -> None:
    try:
        host.switch(drafter_request)
    except ForewordError:  # the first rank refuses it too, and reports it
        return
