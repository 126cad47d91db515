"""The client of an engine in another process: starts the process, sends it requests, and hands out what it answers.

In: checked requests of tasks of one event loop. Out: their `Running`s, filled round by round: tokens come from the engine,
text and stop strings are made here. If the engine's process dies, its requests end with an error; it is started again as
often as `restarts` allows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from time import monotonic
from typing import Any, NoReturn

from foreword.engine.emit import append, publish, with_texts
from foreword.engine.request import Finish, Logprob, Running
from foreword.errors import EngineError, ForewordError, InputError
from foreword.serve.health import Health
from foreword.serve.messages import (
    LENGTH,
    Abort,
    Ended,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Start,
    StepReport,
    Submit,
    ToEngine,
    Use,
    frame,
    from_engine,
)

LAST_WORDS_S = 10.0  # how long a process that was asked to end may take
SILENCE_S = 120.0  # a busy engine reports every second, or after the step that is running
SOCKET_BUFFER = 1 << 20  # bytes
PROGRAM = (sys.executable, "-m", "foreword.serve.engine_process")  # gets the number of its socket as an argument

log = logging.getLogger("foreword.serve")


@dataclass(eq=False)
class Followed:
    """A request that the engine has, and the task that waits for it."""

    run: Running
    number: int
    news: asyncio.Event = field(default_factory=asyncio.Event)


class EngineClient:
    """Implements `AsyncRunner` by an engine in a process of its own. All methods belong to the event loop of `start`."""

    def __init__(
        self,
        options: dict[str, Any],
        restarts: int = 1,
        silence_s: float = SILENCE_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """`options`: the parameters of `foreword.LLM`. `silence_s`: an engine with requests that says nothing for so long is
        killed. `program`: what to run."""
        self.options, self.restarts, self.silence_s = options, restarts, silence_s
        self.ready: Ready
        self.health = Health("starting")
        self._program = program
        self._followed: dict[Running, Followed] = {}
        self._by_number: dict[int, Followed] = {}
        self._numbers = count()
        self._answer: asyncio.Future[Ready] | None = None
        self._writer: StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._attendant: asyncio.Task[None] | None = None
        self._used: tuple[str, dict[str, Any]] | None = None  # the method that was chosen last
        self._heard = 0.0  # when the engine said something last, or had nothing to say

    async def start(self) -> None:
        """Start the engine's process, and return when its model is loaded. Raise what loading raised."""
        reader = await self._launch()
        self._attendant = asyncio.create_task(self._attend(reader), name="foreword-engine")

    async def _launch(self) -> StreamReader:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        command = [*self._program, str(theirs.fileno())]
        with theirs:  # in a session of its own: Ctrl-C in a terminal is for the client, which may drain first
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(Start(self.options))
        try:
            self.ready = _loaded(await _next(reader))
            if self._used is not None:
                method, options = self._used
                self._send(Use(method, options))
                self.ready = _loaded(await _next(reader))
        except IncompleteReadError:
            await self._end()
            status = self._process.returncode
            raise EngineError(
                f"the engine's process ended while it loaded the model (exit status {status}); its messages say why"
            ) from None
        except BaseException:  # refused, or cancelled
            await self._end()
            raise
        self.health = Health("ready")
        return reader

    async def close(self) -> None:
        """End the engine's process. Requests in progress end with an error."""
        if self._attendant is not None:
            self._attendant.cancel()
            with suppress(asyncio.CancelledError):
                await self._attendant
        self._fail_all(EngineError("the engine was closed"))
        self.health = Health("dead")
        await self._end()

    async def _end(self) -> None:
        """Close the connection, which ends the process; kill it if it does not end."""
        process, writer = self._process, self._writer
        self._writer = None
        if writer is not None:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)

    async def _attend(self, reader: StreamReader) -> None:
        """Read what the engine says until it ends, and start it again as long as restarts are left."""
        assert self._process is not None
        while True:
            try:
                await self._read_all(reader)
            except (IncompleteReadError, ConnectionError):
                pass
            except Exception:  # a fault of ours: what the engine goes on to say cannot be trusted to arrive
                log.exception("reading from the engine failed")
                self._process.kill()
            self.health = Health("starting" if self.restarts else "dead")
            await self._end()
            self._fail_all(EngineError(f"the engine's process ended (exit status {self._process.returncode})"))
            if not self.restarts:
                return
            self.restarts -= 1
            try:
                reader = await self._launch()
            except (ForewordError, OSError) as error:
                log.error("the engine could not be started again: %s", error)
                self.health = Health("dead")
                return

    async def _read_all(self, reader: StreamReader) -> NoReturn:
        """Read until the engine's process ends. Kill it if it has requests and is silent for too long: a kernel may hang."""
        assert self._process is not None
        message = asyncio.create_task(_next(reader))
        self._heard = monotonic()
        try:
            while True:
                await asyncio.wait([message], timeout=self._heard + self.silence_s - monotonic())
                if message.done():
                    self._heard = monotonic()
                    self._take(message.result())
                    message = asyncio.create_task(_next(reader))
                elif not self._followed:
                    self._heard = monotonic()
                elif monotonic() - self._heard >= self.silence_s:
                    log.error("the engine was silent for %g s and is killed", self.silence_s)
                    self._process.kill()
                    self._heard = monotonic()
        finally:
            message.cancel()

    # Requests --------------------------------------------------------------------------------------------------------

    def submit(self, runs: Sequence[Running]) -> None:
        """Send requests to the engine."""
        if self.health.state != "ready":
            raise EngineError(f"the engine is {self.health.state}; try again later")
        if not self._followed:  # it was silent because it had nothing to do
            self._heard = monotonic()
        for run in runs:
            followed = Followed(run, next(self._numbers))
            self._followed[run] = self._by_number[followed.number] = followed
            self._send(Submit.of(followed.number, run.request))

    async def more(self, run: Running, shown: int) -> None:
        """Return when a request has more than `shown` events, or is done."""
        followed = self._followed.get(run)
        while followed is not None and not (shown < len(run.events) or run.done):
            followed.news.clear()
            await followed.news.wait()

    async def finished(self, runs: Sequence[Running]) -> None:
        """Submit requests, and return when all are done. A task that is cancelled aborts them."""
        self.submit(runs)
        try:
            for run in runs:
                await self.more(run, sys.maxsize)
        finally:
            self.leave(*runs)

    def leave(self, *runs: Running) -> None:
        """Abort those that are not done."""
        going = [self._followed[run] for run in runs if run in self._followed]
        for followed in going:
            if not followed.run.done:
                followed.run.finish_reason = "abort"
            self._drop(followed)
        if going and self._writer is not None:
            self._send(Abort([followed.number for followed in going]))

    async def use(self, method: str, options: dict[str, Any]) -> None:
        """Switch to another method. Raise what it refuses. Requests in progress are aborted."""
        if self.health.state != "ready" or self._answer is not None:
            raise InputError("the engine cannot switch to another method now; try again later")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._send(Use(method, options))
            self.ready = await self._answer
            self._used = method, options
        finally:
            self._answer = None

    # What the engine says --------------------------------------------------------------------------------------------

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            for progress in message.progress:
                followed = self._by_number.get(progress.number)
                if followed is not None:  # else it was aborted, and the engine did not know yet
                    self._advance(followed, progress, message.clock)
            load = message.load
            self.health = replace(self.health, load=load)
        elif self._answer is not None and not self._answer.done():
            if isinstance(message, Refused):
                self._answer.set_exception(message.failure.error())
            else:
                self._answer.set_result(message)

    def _advance(self, followed: Followed, progress: Progress, clock: float) -> None:
        """Add what rounds brought to a request."""
        run, ended = followed.run, progress.ended
        if progress.begun is not None:
            run.prefill_s, run.reused, run.began = progress.begun.prefill_s, progress.begun.reused, progress.begun.began
        if ended is not None:
            run.draft_was_nan = ended.draft_was_nan
            run.error = ended.failure.error() if ended.failure is not None else None
        run.prefilled = run.rows
        event = append(run, progress.tokens, _finish(ended))
        rounds = _rounds_of(len(event.tokens), progress)
        run.accepted += progress.accepted[:rounds]
        run.drafted += progress.drafted[:rounds]
        if progress.logprobs:
            event.logprobs = _with_texts(run, progress.logprobs[: len(event.tokens)])
            run.logprobs += event.logprobs
        event.predicted = min(progress.predicted, len(event.tokens))
        run.predicted += event.predicted
        if progress.draft is not None:
            event.draft = with_texts(progress.draft, run.request)
        if ended is not None and ended.prompt_logprobs:
            run.prompt_logprobs = _with_texts(run, ended.prompt_logprobs)
        run.decode_s = clock - run.began
        publish(event)
        followed.news.set()
        if run.done:
            self._drop(followed)
            if ended is None and self._writer is not None:  # a stop string ended it, which the engine does not know
                self._send(Abort([followed.number]))

    def _fail_all(self, error: EngineError) -> None:
        """End all requests with an error."""
        for followed in list(self._followed.values()):
            followed.run.finish_reason, followed.run.error = "abort", error
            self._drop(followed)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _drop(self, followed: Followed) -> None:
        """Forget a request, and wake the task that waits for it."""
        del self._followed[followed.run], self._by_number[followed.number]
        followed.news.set()

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))


def _finish(ended: Ended | None) -> Finish | None:
    """Return how a request ends. The engine could not even begin one that it refused."""
    if ended is None:
        return None
    return ended.finish or Finish("abort")


def _rounds_of(tokens: int, progress: Progress) -> int:
    """Return how many of the rounds decided these tokens. A stop string leaves out those after it."""
    if tokens == len(progress.tokens):
        return len(progress.accepted)
    return bisect_left([*accumulate(progress.accepted)], tokens) + 1


def _with_texts(run: Running, entries: Sequence[Logprob]) -> list[Logprob]:
    """Add the texts of tokens to log-probabilities."""
    stream = run.request.stream
    if stream is None:
        return [*entries]
    text = stream.token_text
    return [replace(one, text=text(one.token), top_texts=tuple(text(token) for token, _ in one.top)) for one in entries]


async def _next(reader: StreamReader) -> FromEngine:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return from_engine(await reader.readexactly(size))


def _loaded(message: FromEngine) -> Ready:
    if isinstance(message, Refused):
        raise message.failure.error()
    assert isinstance(message, Ready)
    return message
