"""A fleet: replicas behind a router, simulated event by event. The same seed gives the same result.

In: the costs of a method, requests with their arrival, the size of the fleet. Out: a `Ledger`. Requests go to the replica
with the fewest requests, or all requests of a session to the same replica.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

import numpy as np

from foreword.errors import InputError
from foreword.simulate.arrivals import Arrival
from foreword.simulate.costs import MethodCosts, Scheduling
from foreword.simulate.replica import HttpCosts, Ledger, SimulatedReplica

REPORT_EVERY = 256  # arrivals

Progress = Callable[[int, int], None]  # how many requests have arrived, of how many


class Routing(StrEnum):
    LEAST_LOADED = "least-loaded"
    SESSION = "session"


@dataclass(frozen=True)
class Fleet:
    """How many servers there are, and how each is set up."""

    replicas: int = 1
    slots: int = 8
    routing: Routing = Routing.LEAST_LOADED
    max_queued: int = 256
    http: HttpCosts = HttpCosts()
    contention: float = 1.0  # how much longer a step takes while another replica runs one, as on cores with one memory


def check_sessions(routing: Routing, arrivals: Sequence[Arrival]) -> None:
    """Refuse to route by what the requests do not have."""
    if routing is Routing.SESSION and not any(one.session for one in arrivals):
        raise InputError("--routing session needs requests with a session; give a trace that has them, or leave it out")


def simulate(
    costs: MethodCosts,
    scheduling: Scheduling,
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    seed: int = 0,
    progress: Progress | None = None,
) -> Ledger:
    """Serve all requests, and return what happened to them. `arrivals`: in the order of their seconds."""
    costs.check_slots(fleet.slots)
    check_sessions(fleet.routing, arrivals)
    return _Simulation(costs, scheduling, fleet, arrivals, seed).run(progress or (lambda done, total: None))


class _Simulation:
    def __init__(
        self, costs: MethodCosts, scheduling: Scheduling, fleet: Fleet, arrivals: Sequence[Arrival], seed: int
    ) -> None:
        self.fleet, self.ledger = fleet, Ledger(arrivals)
        rngs = np.random.default_rng(seed).spawn(fleet.replicas)
        self.replicas = [SimulatedReplica(costs, scheduling, fleet.slots, fleet.http, self.ledger, rng) for rng in rngs]
        self.ends: list[tuple[float, int]] = []  # of the steps that run: when, and of which replica
        self.last = -1  # the replica that got the last request

    def run(self, progress: Progress) -> Ledger:
        arrivals = self.ledger.arrivals
        for request, arrival in enumerate(arrivals):
            if request % REPORT_EVERY == 0:
                progress(request, len(arrivals))
            second = arrival.second + self.fleet.http.request_s
            self._advance(second)
            self._arrive(request, arrival, second)
        self._advance(float("inf"))
        return self.ledger

    def _advance(self, second: float) -> None:
        """End all steps that end before `second`, and begin the next ones."""
        while self.ends and self.ends[0][0] < second:
            now, number = heappop(self.ends)
            self.replicas[number].finish(now)
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        slower = self.fleet.contention if self.ends else 1.0
        if (seconds := self.replicas[number].begin(now, slower)) is not None:
            heappush(self.ends, (now + seconds, number))

    def _arrive(self, request: int, arrival: Arrival, now: float) -> None:
        number = self._route(arrival)
        replica = self.replicas[number]
        if replica.requests >= self.fleet.slots + self.fleet.max_queued:
            self.ledger.refused[request] = True
            return
        replica.arrive(request)
        if replica.began is None:
            self._begin(number, now)

    def _route(self, arrival: Arrival) -> int:
        count = len(self.replicas)
        if self.fleet.routing is Routing.SESSION and arrival.session:
            return zlib.crc32(arrival.session.encode()) % count
        turns = [(self.last + 1 + turn) % count for turn in range(count)]
        self.last = min(turns, key=lambda number: self.replicas[number].requests)
        return self.last
