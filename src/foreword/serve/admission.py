"""Admission: which requests may generate, and the end of all of them when the server stops.

A request enters with the number of its outputs before it costs anything, and leaves when it is answered. A server that
drains, or whose engine is not ready, lets nobody in. When it drains, those that are in may finish for a while.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from foreword.serve.errors import Refusal
from foreword.serve.flow import Flow

if TYPE_CHECKING:
    from foreword.serve.async_llm import AsyncLLM

LONGEST_RETRY_S = 60
WHY = {
    "starting": "the engine is starting; try again in a moment",
    "switching": "the engine is switching to another method; try again in a moment",
    "draining": "the server is stopping; ask another one",
    "dead": "the engine has ended; the server has to be started again",
}


class Admission:
    """Counts what is in. All methods belong to the event loop."""

    def __init__(self, llm: AsyncLLM, max_queued: int) -> None:
        self._llm, self._max_queued = llm, max_queued
        self._flows: dict[Flow, int] = {}  # requests that are in, with the number of their outputs
        self._usual_s = 1.0  # what a request has taken lately
        self._draining = self._is_switching = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def state(self) -> str:
        """Return "ready", or a key of WHY."""
        state = self._llm.health.state
        if state != "ready":
            return state
        return "draining" if self._draining else "switching" if self._is_switching else state

    @property
    def inside(self) -> int:
        """The outputs that run or wait."""
        return sum(self._flows.values())

    @contextmanager
    def enter(self, flow: Flow, outputs: int) -> Iterator[None]:
        """Let a request in for the time of this block, or refuse it."""
        self._check(outputs)
        since = monotonic()
        self._flows[flow] = outputs
        self._empty.clear()
        try:
            yield
        finally:
            del self._flows[flow]
            self._usual_s += (monotonic() - since - self._usual_s) / 8
            if not self._flows:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Let nobody in during this block. Refused while anything is in."""
        if (state := self.state) != "ready":
            raise Refusal(503, WHY[state], code=state)
        if self._flows:
            raise Refusal(409, f"{self.inside} outputs run or wait; try again when they have finished", code="busy")
        self._is_switching = True
        try:
            yield
        finally:
            self._is_switching = False

    def _check(self, outputs: int) -> None:
        if (state := self.state) != "ready":
            raise Refusal(503, WHY[state], code=state, headers={"Retry-After": "5"})
        most = self._llm.slots + self._max_queued
        if outputs > most:
            raise Refusal(
                400, f"the request asks for {outputs} outputs; this server takes at most {most} at a time", param="n"
            )
        if self.inside + outputs > most:
            wait = math.ceil(min(self._usual_s * self.inside / self._llm.slots, LONGEST_RETRY_S))
            raise Refusal(
                429,
                f"{self.inside} outputs run or wait, and at most {most} may; try again later",
                headers={"Retry-After": str(max(wait, 1))},
            )

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more. Return when those that are in have finished; after `seconds` they are ended with an
        error."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            for flow in self._flows:
                flow.end(Refusal(503, "the server stops before the output is complete", code="draining"))
            await self._empty.wait()
