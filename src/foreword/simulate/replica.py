"""One replica: a simulated engine, which schedules as `engine/engine.py` does. Its steps take the measured seconds.

A step admits waiting requests to free slots, reads a chunk of each new prompt, and runs a round for all whose prompt is
read. `begin` returns how long that takes, and `finish` gives each sequence its tokens. If rounds are read late, what the
host decides between two rounds holds for the round after the one that runs already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from foreword.engine.admit import round_up
from foreword.simulate.arrivals import Arrival
from foreword.simulate.costs import MethodCosts, Scheduling

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class HttpCosts:
    """What the HTTP process costs."""

    request_s: float = 0.0  # from the arrival of a request until the engine has it
    chunk_s: float = 0.0  # from the end of a round until the client has its tokens, for each stream
    shares_core: bool = False  # with the engine, whose steps are longer by this work


class Ledger:
    """What happened to every request, in seconds since the start. NaN: it did not happen."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.arrivals = arrivals
        self.admitted, self.first, self.ended = (np.full(len(arrivals), np.nan) for _ in range(3))
        self.refused = np.zeros(len(arrivals), dtype=bool)
        self.tokens = np.zeros(len(arrivals), dtype=int)  # written so far
        self.gaps: list[tuple[float, int]] = []  # seconds between two rounds, and of how many sequences
        self.rounds = 0  # of all sequences
        self.slot_seconds = self.busy_seconds = 0.0
        self.reused = 0  # prompt tokens that were not read again


class SimulatedReplica:
    def __init__(
        self,
        costs: MethodCosts,
        scheduling: Scheduling,
        slots: int,
        http: HttpCosts,
        ledger: Ledger,
        rng: np.random.Generator,
    ) -> None:
        self.scheduling, self.slots, self.http, self.ledger, self.rng = scheduling, slots, http, ledger, rng
        self.round_seconds, self.chances = costs.seconds_by_batch(slots), costs.chances_by_batch(slots)
        self.prompt_seconds = cache(costs.prompts.at)
        self.waiting: deque[int] = deque()
        self.staged: list[list[int]] = []  # admitted, and not entered yet: a request, and rows of its prompt to be read
        self.entering: list[list[int]] = []  # the same, while the prompt is being read
        self.running, self.left = np.empty(0, dtype=int), np.empty(0, dtype=int)  # requests, and tokens to come
        self.fresh = 0  # how many of the last of them have no token yet
        self.leaving = 0  # sequences that ended, and take part in a round that was launched before
        self.sessions: dict[str, int] = {}  # of free slots, the oldest first, and how many tokens they hold
        self.http_work = 0.0  # of the HTTP process since the last step began
        self.began: float | None = None  # when the current step began; None: idle

    @property
    def requests(self) -> int:
        return len(self.waiting) + self._used

    @property
    def _used(self) -> int:
        return len(self.staged) + len(self.entering) + len(self.running)

    def arrive(self, request: int) -> None:
        self.waiting.append(request)
        if self.began is not None:
            self.http_work += self.http.request_s

    def begin(self, now: float, slower: float = 1.0) -> float | None:
        """Begin a step and return its seconds; None if there is nothing to do."""
        if self.began is None:
            self.http_work = 0.0  # done while the engine was idle
        self._admit(now)
        seconds = self._read()
        batch, self.leaving = len(self.running) + self.leaving, 0
        if batch:
            seconds += float(self.round_seconds[min(round_up(batch), self.slots) if self.scheduling.captured else batch])
        elif not self.entering:
            self.began = None
            return None
        if self.http.shares_core:
            seconds += self.http_work
        self.http_work = 0.0
        self.began, seconds = now, seconds * slower
        self.ledger.slot_seconds += seconds * self._used
        self.ledger.busy_seconds += seconds
        return seconds

    def _admit(self, now: float) -> None:
        """Give free slots to waiting requests, in their order. They enter this step. If a round was launched already, they
        enter the next one."""
        self.entering, self.staged = self.entering + self.staged, []
        is_launched = self.scheduling.late and self.began is not None
        is_launched = is_launched and bool(len(self.running) or self.leaving or self.entering)
        while self.waiting and self._used < self.slots:
            request = self.waiting.popleft()
            self.ledger.admitted[request] = now
            self.staged.append([request, 0])
            self.staged[-1][1] = self._rows(self.ledger.arrivals[request])
        if not is_launched:
            self.entering, self.staged = self.entering + self.staged, []

    def _rows(self, arrival: Arrival) -> int:
        """Return how many rows of a prompt are to be read: all but the root, and but those that its session left in a slot.
        A request without such a slot takes one of no session, or the one whose session is idle for the longest time."""
        reused = min(self.sessions.pop(arrival.session, 0), arrival.prompt_tokens - 1)
        while len(self.sessions) > self.slots - self._used:
            del self.sessions[next(iter(self.sessions))]
        self.ledger.reused += reused
        return arrival.prompt_tokens - 1 - reused

    def _read(self) -> float:
        """Read chunks of the new prompts, and return the seconds. Requests whose prompt is read join the round."""
        seconds = 0.0
        for _ in range(2 if self.scheduling.captured else 1):
            chunks = [min(rows, self.scheduling.chunk) for _, rows in self.entering if rows]
            if not chunks:
                break
            for one in self.entering:
                one[1] -= min(one[1], self.scheduling.chunk)
            passes = [sum(chunks)] if self.scheduling.joins_prompts else chunks
            seconds += sum(map(self.prompt_seconds, passes))
        ready = [request for request, rows in self.entering if not rows]
        self.entering = [one for one in self.entering if one[1]]
        self.fresh = len(ready)
        if ready:
            self.running = np.append(self.running, ready)
            self.left = np.append(self.left, [self.ledger.arrivals[request].output_tokens for request in ready])
        return seconds

    def finish(self, now: float) -> None:
        """End the step: every sequence of the round gets its tokens."""
        count = len(self.running)
        if not count:
            return
        assert self.began is not None, "a step that began ends"
        tokens = np.searchsorted(self.chances[count], self.rng.random(count), side="right") + 1
        tokens = np.minimum(tokens, self.left)
        self.left = self.left - tokens
        ledger, seen = self.ledger, now + self.http.chunk_s
        ledger.tokens[self.running] += tokens
        ledger.rounds += count
        ledger.first[self.running[count - self.fresh :]] = seen
        if count > self.fresh:
            ledger.gaps.append((now - self.began, count - self.fresh))
        self.http_work += self.http.chunk_s * count
        if (over := self.left == 0).any():
            self._end(self.running[over], seen)
            self.running, self.left = self.running[~over], self.left[~over]

    def _end(self, ended: Numbers, seen: float) -> None:
        self.ledger.ended[ended] = seen
        if self.scheduling.late:
            self.leaving = len(ended)
        for request in ended.tolist() if self.scheduling.reuses else ():
            arrival = self.ledger.arrivals[request]
            if arrival.session:
                self.sessions.pop(arrival.session, None)
                self.sessions[arrival.session] = arrival.prompt_tokens + arrival.output_tokens - 1
