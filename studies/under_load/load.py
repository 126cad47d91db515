"""Load: a server's clients, many at a time. Most read their streams to the end, some vanish, some send rubbish.

In: a running server, cases whose outputs are known, and a plan. Out: `Findings`: how many streams were complete, which of
them differ from the library's output, how fast /health answered, and what both processes held before and after.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

from real_server import RealServer
from under_load.cases import Case, difference
from under_load.client import Address, Answer, Vanish, ask, got, posted
from under_load.processes import Held, held
from under_load.rubbish import RUBBISH, Rubbish

SETTLES_S = 20.0
RETRY_S = 3.0  # at most, where a server says to wait longer
MOST_DIFFERENCES = 20  # that are kept as text
GAUGES = ("requests_running", "requests_waiting", "tasks")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """How many requests come, how many of them at a time, and what part of the clients vanish or send rubbish. Memory after
    the first `early` requests is compared with memory after all. As many as come at a time come before, to warm up."""

    requests: int
    early: int
    streams: int
    vanishing: float = 0.2
    rubbish: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class State:
    """What a server is busy with, and what its processes hold."""

    gauges: dict[str, float]
    held: dict[str, Held]


@dataclass
class Findings:
    """What a load has shown. Times are of the requests after the warm-up."""

    kinds: Counter[str] = field(default_factory=Counter)  # requests by what became of them
    differences: list[str] = field(default_factory=list)
    different: int = 0
    tokens: int = 0  # in complete streams
    firsts: list[float] = field(default_factory=list)  # seconds to the first token
    health: list[float] = field(default_factory=list)  # milliseconds
    seconds: float = 0.0
    most_open: int = 0  # requests at a time
    before: State | None = None  # after the warm-up
    early: State | None = None
    after: State | None = None


class Load:
    """The clients of one server."""

    def __init__(self, server: RealServer, cases: list[Case], plan: Plan, progress: Progress | None = None):
        self.server, self.cases, self.plan = server, cases, plan
        self._progress = progress or (lambda what, done, total: None)
        self.findings = Findings()
        self._random, self._rubbish = Random(plan.seed), cycle(RUBBISH)
        self._open = self._done = 0

    async def run(self) -> Findings:
        """Run everything, and return what was found."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a client needs one, and the usual limit is 1024
        gc.collect()
        gc.freeze()  # the library is loaded in this process, and collecting its objects would stop all clients
        found = self.findings
        await self._requests(self.plan.streams, "warming up")  # all at a time: memory grows with that number
        found.before = await self._settled()
        found.kinds.clear()
        found.firsts.clear()
        found.tokens, found.seconds = 0, 0.0
        async with _health(self.server.address, found.health):
            await self._requests(self.plan.early, "first requests")
        found.early = await self._settled(found.before)
        async with _health(self.server.address, found.health):
            await self._requests(self.plan.requests - self.plan.early, "all requests")
        found.after = await self._settled(found.before)
        return found

    async def _requests(self, count: int, what: str) -> None:
        """Send requests, as many at a time as the plan says."""
        self._done, left, since = 0, iter(range(count)), time.perf_counter()

        async def client() -> None:
            for _ in left:
                await self._request()
                self._done += 1
                self._progress(what, self._done, count)

        await asyncio.gather(*(client() for _ in range(min(self.plan.streams, count))))
        self.findings.seconds += time.perf_counter() - since

    async def _request(self) -> None:
        """Send one request, and check what comes back."""
        self._open += 1
        self.findings.most_open = max(self.findings.most_open, self._open)
        try:
            chance = self._random.random()
            if chance < self.plan.rubbish:
                await self._send_rubbish(next(self._rubbish))
            elif chance < self.plan.rubbish + self.plan.vanishing:
                await self._vanish()
            else:
                await self._stay()
        finally:
            self._open -= 1

    async def _send_rubbish(self, rubbish: Rubbish) -> None:
        self.findings.kinds["rubbish"] += 1
        answer = await ask(self.server.address, rubbish.request, rubbish.vanish)
        self._note(rubbish.difference(answer))

    async def _vanish(self) -> None:
        """Send a request and leave before its answer is complete, at a random point."""
        random, resets = self._random, self._random.random() < 0.5
        ways: dict[str, Vanish] = {
            "vanished in the body": Vanish(random.uniform(0.2, 0.9), random.uniform(0, 0.2), resets=resets),
            "vanished in the queue": Vanish(after_s=random.uniform(0, 0.5), resets=resets),
            "vanished in the stream": Vanish(when=_has_events(random.randint(1, 8)), resets=resets),
            "vanished after the last token": Vanish(when=_has_ended, resets=resets),
        }
        name = random.choice([*ways])
        self.findings.kinds[name] += 1
        await ask(self.server.address, self._encoded(random.choice(self.cases)), ways[name])

    async def _stay(self) -> None:
        """Read a stream to its end. A client that is refused because the queue is full asks again."""
        case, random = self._random.choice(self.cases), self._random
        while (answer := await ask(self.server.address, self._encoded(case))).status == 429:
            self.findings.kinds["asked again after 429"] += 1
            await asyncio.sleep(min(float(answer.headers["retry-after"]), RETRY_S) * random.uniform(0.5, 1))
        self.findings.kinds["read to the end"] += 1
        if answer.status != 200 or not answer.complete:
            self._note(f"the answer has status {answer.status}, and {len(answer.body)} bytes: {answer.body[:300]!r}")
            return
        self._note(difference(case, answer.body))
        self.findings.tokens += sum(len(one.tokens) for one in case.expected)
        if answer.first_s is not None:
            self.findings.firsts.append(answer.first_s)

    def _encoded(self, case: Case) -> bytes:
        return posted(case.path, case.body, keep_alive=self._random.random() < 0.5)

    def _note(self, problem: str | None) -> None:
        if problem is not None:
            self.findings.different += 1
            self.findings.differences = [*self.findings.differences, problem][:MOST_DIFFERENCES]

    async def _settled(self, before: State | None = None) -> State:
        """Return the state of the server when nothing is left of the load, or after a while. `before`: how it was before."""
        until = time.monotonic() + SETTLES_S
        while not _is_idle(state := await self.state(), before) and time.monotonic() < until:
            await asyncio.sleep(0.25)
        return state

    async def state(self) -> State:
        """Return what the server is busy with."""
        answer = await ask(self.server.address, got("/metrics"))
        text = answer.body.decode()
        gauges = dict(re.findall(r"^foreword:(\w+){.*} (\S+)$", text, re.MULTILINE))
        processes = {"server": self.server.process.pid, "engine": self.server.engine}
        return State(
            {name: float(gauges[name]) for name in GAUGES}, {name: held(process) for name, process in processes.items()}
        )


def _has_events(count: int) -> Callable[[Answer], bool]:
    return lambda answer: answer.events >= count


def _has_ended(answer: Answer) -> bool:
    """Return whether an output has ended; the stream itself has more to tell."""
    return answer.body.find(b'"finish_reason":"', -2000 if len(answer.body) > 2000 else 0) >= 0


def _is_idle(state: State, before: State | None) -> bool:
    """Return whether a server has nothing to do, and its processes hold no more descriptors than before."""
    if state.gauges["requests_running"] or state.gauges["requests_waiting"]:
        return False
    held = state.held.items()
    return before is None or all(one.descriptors <= before.held[name].descriptors for name, one in held)


@asynccontextmanager
async def _health(address: Address, found: list[float]) -> AsyncIterator[None]:
    """Time /health during this block, in another process."""
    program = Path(__file__).with_name("health.py")
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-S", str(program), address[0], str(address[1])]
    asking = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        yield
    finally:
        printed, _ = await asking.communicate(b"")  # closes its stdin
        found += json.loads(printed)


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of all do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
