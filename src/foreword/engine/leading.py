"""LeadingEngine: the engine of the first of several ranks. It tells the others what it does, before it does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from foreword.core.sampling import Sampling
from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.emit import Launched
from foreword.engine.engine import Engine
from foreword.engine.orders import Order, Step, WarmUp, digest, packed
from foreword.engine.request import Event, Request, Running
from foreword.ranks.links import Links


class LeadingEngine(Engine):
    """An engine whose calls the other ranks repeat. Only one that changes something is sent, and none that it makes
    itself."""

    def __init__(self, *args: Any, links: Links, **options: Any) -> None:
        super().__init__(*args, **options)
        self.links = links
        self._numbers: dict[Running, int] = {}  # of requests that the others know, or get to know with the next step
        self._arrived: dict[int, Request] = {}  # requests that they do not know yet
        self._next = count()
        self._is_ordered = False  # a call of ours is running that they repeat as a whole

    def queue(self, runs: Iterable[Running]) -> None:
        runs = list(runs)
        if not self._is_ordered:
            for running in runs:
                self._numbers[running] = number = next(self._next)
                self._arrived[number] = running.request
        super().queue(runs)

    def abort(self, *given: Running) -> None:
        known = [running for running in given if running in self._numbers]
        if self._is_ordered or not known or self.links.failed:
            super().abort(*given)
            return
        with DelayedCtrlC(), self._ordered(self._step([self._numbers[running] for running in known], 0)):
            super().abort(*given)
            for running in known:
                self._numbers.pop(running, None)

    def warm_up(self, shortest: int = 2, longest: int | None = None, sampling: Sampling | None = None) -> None:
        with self._ordered(WarmUp(shortest, longest, sampling)):
            super().warm_up(shortest, longest, sampling)

    def advance(self, rounds: int = 1) -> tuple[Launched | None, dict[Running, Event]]:
        if self._is_ordered:
            return super().advance(rounds)
        with DelayedCtrlC(), self._ordered(self._step([], rounds)):
            found = super().advance(rounds)
            self._numbers = {running: number for running, number in self._numbers.items() if not running.done}
            return found

    def _step(self, aborted: list[int], rounds: int) -> Step:
        arrived, self._arrived = self._arrived, {}
        return Step(arrived, aborted, rounds, digest(self.slots.running.values()))

    @contextmanager
    def _ordered(self, order: Order) -> Iterator[None]:
        """Send an order, and do in this block what it says. If that fails, the other ranks cannot go on."""
        self.links.send_bytes(packed(order))
        self._is_ordered = True
        try:
            yield
        except BaseException as error:
            self.links.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._is_ordered = False
