"""Flow: what happens to the runs of one HTTP request, in order: new rounds, pauses, and what ends it before its time.

A task follows each run, one waits for the client to leave, timers remind of the time; all put news into one queue, and the
handler reads it. So nothing is cancelled to look at a clock, and rounds that come while the handler writes are read
together. A client that does not read cannot keep its request from ending.
When the block ends, for whatever reason, the engine drops every run that has not finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from starlette.types import Receive

from foreword.engine.request import Event, Running
from foreword.serve.errors import ClientGone, Refusal

if TYPE_CHECKING:
    from foreword.api import AsyncStream
    from foreword.serve.async_llm import AsyncLLM

LAST_WRITE_S = 1.0  # how long a client may take to read on when its request has been ended
Found = TypeVar("Found")


@dataclass
class Output:
    """One of the outputs of a request: its run, and how much of it the handler has seen."""

    index: int
    run: Running
    seen: int = 0  # events

    def fresh(self) -> list[Event]:
        """Return the events since the last call."""
        events = self.run.events[self.seen :]
        self.seen += len(events)
        return events


@dataclass
class News:
    """What is new of an output: the events of one or several rounds, and whether it has ended."""

    output: Output
    events: list[Event]
    ended: bool


class Flow:
    """The runs of one HTTP request. Use it in an `async with` block from the moment that the body is read."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        """`receive`: of the request, after its body. `seconds`: the most time that it may take."""
        self._receive, self._seconds = receive, seconds
        self._news: asyncio.Queue[tuple[Output, bool] | Exception | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[AsyncStream] = []
        self._outputs: list[Output] = []
        self._writing: asyncio.Timeout | None = None
        self._last_write: float | None = None  # by the loop's clock: no write takes longer than until then

    async def __aenter__(self) -> Self:
        late = Refusal(
            504, f"the request took longer than {self._seconds:g} s; ask for fewer tokens", code="request_timeout"
        )
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.end, late)
        self._begin(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()
        # A cancelled task leads back here, and an event to its run: only the garbage collector would free them.
        self._tasks.clear()
        for output in self._outputs:
            output.run.events.clear()

    def end(self, error: Exception) -> None:
        """End the request early: the handler gets this error as its next news."""
        self._news.put_nowait(error)
        self._last_write = asyncio.get_running_loop().time() + LAST_WRITE_S
        if self._writing is not None:
            self._writing.reschedule(self._last_write)

    async def written(self, write: Awaitable[None]) -> None:
        """Wait until the client has read enough to take a write. When its request has been ended, it must soon."""
        try:
            async with asyncio.timeout_at(self._last_write) as self._writing:
                await write
        except TimeoutError as error:
            raise ClientGone from error
        finally:
            self._writing = None

    async def first(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Do what comes before the rounds, and return what it returns. Raise what ends the request early."""
        found: list[Found] = []
        self._begin(self._do(work, found))
        news = await self._news.get()
        if isinstance(news, Exception):
            try:
                raise news
            finally:
                del news  # this frame is in its traceback: the two would keep each other
        return found[0]

    async def _do(self, work: Coroutine[Any, Any, Found], found: list[Found]) -> None:
        try:
            found.append(await work)
            self._news.put_nowait(None)
        except Exception as error:
            self._news.put_nowait(error)

    async def rounds(self, llm: AsyncLLM, runs: Sequence[Running], pause: float) -> AsyncIterator[News | None]:
        """Run requests, and yield what is new of them until all have ended; None after every `pause` seconds without news.
        Raise what ends the request early."""
        self._outputs = [Output(index, run) for index, run in enumerate(runs)]
        for output in self._outputs:
            self._streams.append(llm.run(output.run))
            self._begin(self._follow(output, self._streams[-1]))
        loop, left = asyncio.get_running_loop(), len(runs)
        while left:
            reminder = loop.call_later(pause, self._news.put_nowait, None)
            try:
                some = await self._news.get()
            finally:
                reminder.cancel()
            if isinstance(some, Exception):
                try:
                    raise some
                finally:
                    del some  # this frame is in its traceback: the two would keep each other
            if some is None:
                yield None
                continue
            output, ended = some
            left -= ended
            events = output.fresh()
            if events or ended:
                yield News(output, events, ended)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _follow(self, output: Output, stream: AsyncStream) -> None:
        """Tell of each round of a run, and of its end."""
        try:
            async for _ in stream:
                self._news.put_nowait((output, False))
            self._news.put_nowait((output, True))
        except Exception as error:
            self._news.put_nowait(error)

    async def _watch(self) -> None:
        """Wait until the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())
