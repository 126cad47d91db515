"""From a ledger to figures: throughput, latency and how busy the fleet was.

The first token counts from the arrival, and so does the latency of a request. The time between tokens is a mean per
request, as clients report it; that between rounds is how long a stream pauses. Refused requests count as such alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword.simulate.fleet import Fleet
from foreword.simulate.replica import Ledger

PERCENTILES = (50, 95, 99)
GROWING = 0.05  # a queue of more than this share of all requests, when the last one arrives, is one that grows


@dataclass(frozen=True)
class Spread:
    """A distribution of seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @staticmethod
    def of(seconds: Any, weights: Any = None) -> Spread | None:
        """Return the spread of some seconds, each counted as often as its weight says; None if there are none."""
        if len(seconds) == 0:
            return None
        seconds = np.asarray(seconds)
        weights = np.ones(len(seconds)) if weights is None else np.asarray(weights)
        order = seconds.argsort()
        reached = weights[order].cumsum() / weights.sum()
        places = [min(int(np.searchsorted(reached, percent / 100)), len(seconds) - 1) for percent in PERCENTILES]
        return Spread(float(np.average(seconds, weights=weights)), *(float(seconds[order][place]) for place in places))


@dataclass(frozen=True)
class ServingFigures:
    """What a load did to a fleet, or the fleet to the load."""

    requests: int  # served
    refused: int  # the queue was full
    tokens: int  # of all outputs
    seconds: float  # from the first arrival to the last token
    tokens_per_s: float
    requests_per_s: float
    tokens_per_round: float
    first_token_s: Spread | None
    between_tokens_s: Spread | None
    between_rounds_s: Spread | None
    queue_s: Spread | None  # the wait for a slot
    request_s: Spread | None
    slots_used: float  # share, over time
    busy: float  # share of the time in which replicas run steps
    mean_requests: float  # in slots, over time, of the whole fleet
    reused_tokens: int  # of prompts, that were cached
    waiting_at_end: int  # for a slot, when the last request arrives

    @property
    def keeps_up(self) -> bool:
        """Whether the queue does not grow for as long as requests arrive, and none is refused."""
        return not self.refused and self.waiting_at_end <= max(GROWING * self.requests, 1)


def figures(ledger: Ledger, fleet: Fleet) -> ServingFigures:
    """Return the figures of a run."""
    arrived = np.array([one.second for one in ledger.arrivals])
    asked = np.array([one.output_tokens for one in ledger.arrivals])
    served = ~ledger.refused
    latest = float(np.nanmax(ledger.ended)) if served.any() else float(arrived[-1])
    seconds = max(latest - float(arrived[0]), 1e-9)
    several = served & (asked > 1)
    gaps = np.array(ledger.gaps, dtype=float).reshape(-1, 2)
    tokens, capacity = int(ledger.tokens.sum()), seconds * fleet.replicas
    return ServingFigures(
        requests=int(served.sum()),
        refused=int(ledger.refused.sum()),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=float(served.sum()) / seconds,
        tokens_per_round=tokens / max(ledger.rounds, 1),
        first_token_s=Spread.of((ledger.first - arrived)[served]),
        between_tokens_s=Spread.of(((ledger.ended - ledger.first) / np.maximum(asked - 1, 1))[several]),
        between_rounds_s=Spread.of(gaps[:, 0], gaps[:, 1]),
        queue_s=Spread.of((ledger.admitted - arrived)[served]),
        request_s=Spread.of((ledger.ended - arrived)[served]),
        slots_used=ledger.slot_seconds / (capacity * fleet.slots),
        busy=min(ledger.busy_seconds / capacity, 1.0),  # the last step may end after the last token
        mean_requests=ledger.slot_seconds / seconds,
        reused_tokens=ledger.reused,
        waiting_at_end=int((served & (ledger.admitted > arrived[-1])).sum()),
    )
