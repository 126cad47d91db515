"""The engine's process: loads a model, then runs steps, and does nothing else.

A Python thread next to the step loop would take the interpreter's lock from it for milliseconds per round, so that HTTP,
text and metrics live in another process (docs/decisions/32-two-processes.md). In: messages of a client on a socket. Out: the
tokens of each round. The process ends when its client has gone. Another thread compiles grammars while rounds run: xgrammar
does that without the lock.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.engine.request import Running
from foreword.errors import ForewordError
from foreword.launch import start_others
from foreword.serve.frames import Closed, FrameSocket
from foreword.serve.messages import (
    Abort,
    Ended,
    Failure,
    FromEngine,
    Progress,
    Refused,
    Start,
    StepReport,
    Submit,
    ToEngine,
    Use,
    ended_of,
    frame,
    progress_of,
    to_engine,
)
from foreword.serve.outbox import Outbox
from foreword.serve.ready import engine_load, ready

MOST_SILENCE_S = 1.0  # between steps, while requests run: the client takes longer silence for a fault
MOST_BROKEN_STEPS = 3  # in a row; then this process ends, so that its client starts another
COLLECT_EVERY_S = 60.0

log = logging.getLogger("foreword.serve")


class EngineServer:
    """Serves one client with one engine."""

    def __init__(self, llm: LLM, channel: FrameSocket) -> None:
        self.llm, self.channel = llm, channel
        self.running: dict[int, Running] = {}
        self.numbers: dict[Running, int] = {}
        self.checks: dict[int, Future[Running]] = {}  # of requests whose grammar is being compiled
        self.checker = ThreadPoolExecutor(1, "foreword-grammars")
        self.outbox = Outbox()
        self.last_collected = 0.0
        self.broken_steps = 0

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def run(self) -> NoReturn:
        """Serve until the client has gone, which raises `Closed`."""
        while True:
            for body in self.channel.received(wait=0.0 if self.engine.busy or self.checks else None):
                self.handle(to_engine(body))
            self._queue_checked()
            if self.engine.busy:
                self.step()
            self.report()
            if not self.engine.busy:
                self._collect()

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                self._abort(message.numbers)
            case Use():
                self._use(message)
            case Start():
                raise AssertionError("a model is loaded once")

    def _submit(self, message: Submit) -> None:
        try:
            request = message.unpacked()
        except ForewordError as error:
            self._refuse(message.number, error)
            return
        if request.grammar is None:
            self._queue(message.number, partial(self.engine.checked, request))
        else:
            self.checks[message.number] = self.checker.submit(self.engine.checked, request)

    def _queue_checked(self) -> None:
        """Queue the requests whose grammar is compiled. If nothing else runs, wait for that."""
        for number, check in [*self.checks.items()]:
            if check.done() or not self.engine.busy:
                del self.checks[number]
                self._queue(number, check.result)

    def _queue(self, number: int, checked: Callable[[], Running]) -> None:
        try:
            running = checked()
        except ForewordError as error:  # a client checks its requests; this one did not, or the method has changed since
            self._refuse(number, error)
            return
        self.engine.queue([running])
        self.running[number] = running
        self.numbers[running] = number

    def _refuse(self, number: int, error: ForewordError) -> None:
        self.outbox.add(Progress(number, [], [], [], ended=Ended(None, Failure.of(error))))

    def _abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.checks.pop(number, None)
        going = [self.running[number] for number in numbers if number in self.running]
        self.engine.abort(*going)
        self._forget(going)
        self.outbox.is_urgent = True  # the client counts what runs

    def _use(self, message: Use) -> None:
        answer: FromEngine
        try:
            self.llm.use(message.method, **message.options)
            answer = ready(self.llm)
        except ForewordError as error:
            answer = Refused(Failure.of(error))
        self._add_aborted()
        self.report(at_once=True)
        self.channel.send(frame(answer))

    def step(self) -> None:
        """Run a step, and keep what it brought. A step that breaks ends all requests."""
        try:
            events = self.engine.step()
        except Exception as error:
            self.broken_steps += 1
            self._add_aborted()
            self.report(at_once=True)
            if self.broken_steps >= MOST_BROKEN_STEPS:
                self.channel.flush()
                raise
            log.error("a step broke, and its requests are aborted: %r", error)
            return
        self.broken_steps = 0
        for event in events:
            self.outbox.add(progress_of(self.numbers[event.running], event))
        self._forget([event.running for event in events if event.running.done])

    def _add_aborted(self) -> None:
        ended = [running for running in self.numbers if running.done]
        for running in ended:
            self.outbox.add(Progress(self.numbers[running], [], [], [], ended=ended_of(running)))
        self._forget(ended)

    def _forget(self, runs: Iterable[Running]) -> None:
        for running in runs:
            del self.running[self.numbers.pop(running)]

    def report(self, at_once: bool = False) -> None:
        """Send what rounds have brought, unless it is little and can wait for the next round."""
        is_silent = self.engine.busy and self.outbox.silence >= MOST_SILENCE_S
        if at_once or is_silent or self.outbox.is_due(len(self.running) if self.engine.busy else 0):
            self.channel.send(frame(StepReport(self.outbox.taken(), engine_load(self.engine), self.engine.clock)))

    def _collect(self) -> None:
        """Collect garbage while nothing runs: the collector is off, since it would make single rounds long."""
        if time.monotonic() - self.last_collected >= COLLECT_EVERY_S:
            gc.collect()
            self.last_collected = time.monotonic()


def main(descriptor: int) -> None:
    """Serve the client at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle
    channel = FrameSocket(socket.socket(fileno=descriptor))
    try:
        llm = _loaded(channel)
        if llm is not None:
            channel.send(frame(ready(llm)))
            gc.collect()
            gc.freeze()
            gc.disable()
            EngineServer(llm, channel).run()
    except Closed:
        pass


def _loaded(channel: FrameSocket) -> LLM | None:
    """Load the model that the first message names. None: it is refused, and the client knows why."""
    options: dict[str, Any] | None = None
    while options is None:
        for body in channel.received(wait=None):
            start = to_engine(body)
            assert isinstance(start, Start), "the first message says what to load"
            options = start.options
    try:
        start_others(options)
        return LLM(**options)
    except ForewordError as error:
        channel.send(frame(Refused(Failure.of(error))))
        channel.flush()
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
