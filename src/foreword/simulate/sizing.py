"""How many replicas a load needs: the smallest fleet that keeps up and meets a latency goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foreword.errors import InputError
from foreword.simulate.arrivals import Arrival
from foreword.simulate.costs import MethodCosts, Scheduling
from foreword.simulate.figures import ServingFigures, figures
from foreword.simulate.fleet import Fleet, Progress, simulate

MOST_REPLICAS = 1024


@dataclass(frozen=True)
class LatencyGoal:
    """The 95th percentiles that a fleet must meet, in seconds. None: any."""

    first_token_s: float | None = None
    between_tokens_s: float | None = None

    @property
    def wanted(self) -> bool:
        return self.first_token_s is not None or self.between_tokens_s is not None

    def is_met(self, found: ServingFigures) -> bool:
        pairs = (found.first_token_s, self.first_token_s), (found.between_tokens_s, self.between_tokens_s)
        return found.keeps_up and all(goal is None or spread is None or spread.p95 <= goal for spread, goal in pairs)


@dataclass(frozen=True)
class Load:
    """The requests of a simulation, how engines schedule them, and the seed."""

    arrivals: Sequence[Arrival]
    scheduling: Scheduling
    seed: int = 0

    def served_by(self, costs: MethodCosts, progress: Progress | None, fleet: Fleet) -> ServingFigures:
        return figures(simulate(costs, self.scheduling, fleet, self.arrivals, self.seed, progress), fleet)


def smallest_fleet(
    serve: Callable[[Fleet], ServingFigures], fleet: Fleet, goal: LatencyGoal, requests: int
) -> tuple[Fleet, ServingFigures]:
    """Return the fleet with the fewest replicas that meets the goal, and its figures. `serve` simulates a fleet. Sizes are
    doubled until one meets it, and then halved between. With a replica for every request, a goal that is missed cannot be
    met."""
    most = min(requests, MOST_REPLICAS)
    failed, size = 0, 1
    while not goal.is_met(found := serve(replace(fleet, replicas=size))):
        if size >= most:
            raise InputError(_why(found, goal, size))
        failed, size = size, min(size * 2, most)
    while size - failed > 1:
        middle = (failed + size) // 2
        tried = serve(replace(fleet, replicas=middle))
        if goal.is_met(tried):
            size, found = middle, tried
        else:
            failed = middle
    return replace(fleet, replicas=size), found


def _why(found: ServingFigures, goal: LatencyGoal, replicas: int) -> str:
    parts = [
        f"{name} is {spread.p95 * 1e3:.1f} ms at p95 and the goal is {wanted * 1e3:.1f} ms"
        for name, spread, wanted in (
            ("the first token", found.first_token_s, goal.first_token_s),
            ("the time between tokens", found.between_tokens_s, goal.between_tokens_s),
        )
        if wanted is not None and spread is not None and spread.p95 > wanted
    ]
    missed = "; ".join(parts) or "the queue still grows"
    return f"no fleet meets the goal: with {replicas} replicas {missed}; relax it, or ask for less load"
