"""Driver: steps one engine for callers in any number of threads and event loops, one thread at a time.

Callers submit requests and wait. All share the batch. The driver's own thread steps the engine. On a CPU the main thread
does so itself while it waits: a second thread would bring a second set of OpenMP threads, which makes products slower. The
engine runs only while a caller waits: a stream that nobody reads costs nothing. To abort a request or to change the method,
a caller claims the engine between two steps (`claimed`).
"""

from __future__ import annotations

import asyncio
import atexit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Condition, Event, Thread, current_thread, main_thread
from typing import Protocol
from weakref import WeakSet, finalize

from foreword.engine.ctrl_c import DelayedCtrlC
from foreword.engine.engine import Engine
from foreword.engine.request import Running
from foreword.errors import InputError, QueueFull
from foreword.ops.device import host_computes

MOST_WAITING = 65_536  # requests without a slot, of all callers together
LAST_STEP_S = 10.0  # how long a process that ends waits for the step that is running


@dataclass(eq=False)
class Waiter:
    """A caller that waits until `is_ready` holds. Then `wake` is called once, in whichever thread finds out."""

    is_ready: Callable[[], bool]
    wake: Callable[[], None] = lambda: None


class AsyncRunner(Protocol):
    """What runs requests for tasks of an event loop: a `Driver`, or the client of an engine in another process."""

    def submit(self, runs: Sequence[Running]) -> None:
        """Queue requests."""

    async def more(self, run: Running, shown: int) -> None:
        """Return when a request has more than `shown` events, or is done."""

    async def finished(self, runs: Sequence[Running]) -> None:
        """Submit requests, and return when all are done. A task that is cancelled aborts them."""

    def leave(self, *runs: Running) -> None:
        """Abort those that are not done, without waiting for the engine."""


_drivers: WeakSet[Driver] = WeakSet()


@atexit.register
def _end_threads() -> None:
    """End all threads before the interpreter ends. It would stop a daemon thread in the middle of a torch operation, and
    unwinding torch's C++ frames aborts the whole process."""
    for driver in list(_drivers):
        driver.end_thread()


class Driver:
    """Steps an engine for all callers. All methods may be called from any thread."""

    def __init__(self, engine: Engine, most_waiting: int = MOST_WAITING) -> None:
        self.engine = engine
        self.most_waiting = most_waiting
        self.closed = False
        self._lock = Condition()  # guards everything below, and the engine between its steps
        self._arrived: deque[Running] = deque()
        self._leaving: deque[Running] = deque()  # aborted by callers that may not wait for a step
        self._waiters: list[Waiter] = []
        self._claims = 0  # callers that want exclusive use of the engine before its next step
        self._stepping = False
        self._stepper: Thread | None = None  # the thread that steps the engine now: the main thread or `_thread`
        self._thread: Thread | None = None
        # An idle thread holds only this queue, so it keeps no model alive.
        self._work: SimpleQueue[Driver | None] = SimpleQueue()
        finalize(self, self._work.put, None)
        _drivers.add(self)

    def submit(self, runs: Sequence[Running]) -> None:
        """Queue requests that the engine has checked. They enter the batch when a slot is free and a caller waits."""
        with self._lock:
            if self.closed:
                raise InputError("this LLM is closed; load or wrap the model again")
            queued = len(self._arrived) + len(self.engine.waiting)
            # A list longer than the queue may hold is still served if nothing else waits.
            if queued and queued + len(runs) > self.most_waiting:
                raise QueueFull(
                    f"{queued} requests wait for a slot and {len(runs)} more do not fit: at most {self.most_waiting} may "
                    "wait; try again when some have finished"
                )
            self._arrived.extend(runs)

    def run(self, runs: Sequence[Running]) -> Iterator[Running]:
        """Submit requests, and yield each when it has finished, in their order. Leaving early aborts the rest.

        The engine continues with all of them, in its own thread, while the caller handles the first."""
        remaining = deque(runs)
        self.submit(runs)
        try:
            with self._waiting(Waiter(partial(_all_done, remaining))):
                for run in runs:
                    self.wait(partial(getattr, run, "done"))
                    yield run
        finally:
            self.abort(*runs)

    def run_all(self, runs: Sequence[Running]) -> None:
        """Submit requests, and return when all have finished."""
        remaining = deque(runs)
        self.submit(runs)
        try:
            self.wait(partial(_all_done, remaining))
        finally:
            self.abort(*runs)

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Return when `is_ready()`, which is called between steps and must be quick. On a CPU the main thread steps the
        engine meanwhile, unless the driver's thread does so already; other callers sleep."""
        woken = Event()
        can_step = current_thread() is main_thread() and host_computes(self.engine.target.device)
        with self._waiting(Waiter(is_ready, woken.set), can_step):
            if self._stepper is current_thread():
                self._step_until(woken)
            woken.wait()

    async def ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready()` in a task of an event loop: no thread sleeps for it."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed, so no task waits any more
                loop.call_soon_threadsafe(woken.set)

        with self._waiting(Waiter(is_ready, wake)):
            await woken.wait()

    async def more(self, run: Running, shown: int) -> None:
        """Return when a request has more than `shown` events, or is done."""
        await self.ready(lambda: shown < len(run.events) or run.done)

    async def finished(self, runs: Sequence[Running]) -> None:
        """Submit requests, and return when all have finished. A task that is cancelled aborts them."""
        remaining = deque(runs)
        self.submit(runs)
        try:
            await self.ready(partial(_all_done, remaining))
        finally:
            self.leave(*runs)

    @contextmanager
    def _waiting(self, waiter: Waiter, can_step: bool = False) -> Iterator[None]:
        """Let the engine step until this waiter is ready. If `can_step` and no thread steps, the caller will."""
        try:
            with self._lock:
                if not self._woke(waiter):
                    self._waiters.append(waiter)
                    if not can_step:
                        self._start()
                    elif self._stepper in (None, current_thread()):  # the latter if Ctrl-C came as it stopped stepping
                        self._stepper = current_thread()
            yield
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def abort(self, *runs: Running) -> None:
        """Abort requests, queued or running. Return when the engine has released them."""
        going = [run for run in runs if not run.done]
        if not going:
            return
        if current_thread() is self._stepper:  # the garbage collector dropped a stream in the middle of a step
            self._leaving.extend(going)
            return
        with DelayedCtrlC(), self.claimed() as engine:
            self._drop(engine, going)

    def leave(self, *runs: Running) -> None:
        """Abort requests without waiting for the current step: the driver's thread releases them after it."""
        going = [run for run in runs if not run.done]
        if going:
            with self._lock:
                self._leaving.extend(going)
                self._start()

    @contextmanager
    def claimed(self) -> Iterator[Engine]:
        """Get exclusive use of the engine, between two steps; other callers wait."""
        with self._lock:
            self._claims += 1
            try:
                self._lock.wait_for(lambda: not self._stepping)
            finally:
                self._claims -= 1
            try:
                yield self.engine
            finally:
                self._lock.notify_all()

    def give_up(self) -> None:
        """Abort all requests of all callers. The caller must have claimed the engine."""
        self._drop(self.engine, [*self._arrived])
        self.engine.give_up()

    def _drop(self, engine: Engine, runs: list[Running]) -> None:
        gone = set(runs)
        if self._arrived:
            self._arrived = deque(run for run in self._arrived if run not in gone)
        engine.abort(*runs)

    def _start(self) -> None:
        """Wake the driver's thread, or create it, unless a thread steps already. A forked child has none."""
        if self._stepper is not None and self._stepper.is_alive():
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=_serve, args=(self._work,), name="foreword-engine", daemon=True)
            self._thread.start()
        self._stepper = self._thread
        self._work.put(self)

    def end_thread(self, seconds: float = LAST_STEP_S) -> None:
        """Let the running step end, and then the thread. Requests stay; the next caller starts a new thread."""
        if self._lock.acquire(timeout=seconds):
            try:
                self._waiters.clear()
                thread = self._thread
                self._work.put(None)
            finally:
                self._lock.release()
            if thread is not None and thread is not current_thread():
                thread.join(seconds)

    def _step_until(self, woken: Event) -> None:
        """Step in the caller's thread until it is woken. Then the driver's thread continues for the others."""
        try:
            while not woken.is_set():
                with DelayedCtrlC():
                    self._step()
        finally:
            with DelayedCtrlC(), self._lock:
                self._stepper = None
                if any(not waiter.is_ready() for waiter in self._waiters):
                    self._start()

    def _step(self) -> bool:
        """Run one step and return True, or return False if no caller waits."""
        arriving = self._prepare()
        if arriving is None:
            return False
        try:
            self.engine.queue(arriving)
            self.engine.advance()
        except BaseException as error:  # every caller with a request in this step gets it
            self._fail(arriving, error)
        with self._lock:
            self._stepping = False
            if self._claims:
                self._lock.notify_all()
        return True

    def _prepare(self) -> list[Running] | None:
        """Wake the waiters that are ready. If some still wait, begin a step and return the requests that arrived for it;
        otherwise return None."""
        with self._lock:
            self._lock.wait_for(lambda: not self._claims)
            self._drop(self.engine, [*self._leaving])
            self._leaving.clear()
            self._waiters = [waiter for waiter in self._waiters if not self._woke(waiter)]
            if not self._waiters:
                self._stepper = None
                return None
            arriving = [*self._arrived]
            self._arrived.clear()
            self._stepping = True
            return arriving

    def _woke(self, waiter: Waiter) -> bool:
        is_ready = waiter.is_ready()
        if is_ready:
            waiter.wake()
        return is_ready

    def _fail(self, arriving: list[Running], error: BaseException) -> None:
        """Abort the arriving requests after a step broke. The engine has already aborted those it had."""
        unfinished = [run for run in arriving if not run.done]
        self.engine.abort(*unfinished)
        for run in unfinished:
            run.error = error


def _all_done(remaining: deque[Running]) -> bool:
    """Return whether all have finished. Finished requests are removed from the front and not checked again."""
    while remaining and remaining[0].done:
        remaining.popleft()
    return not remaining


def _serve(work: SimpleQueue[Driver | None]) -> None:
    """Run the driver's thread. It ends when its driver is garbage-collected."""
    while (driver := work.get()) is not None:
        while driver._step():
            pass
        del driver
