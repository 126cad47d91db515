"""Outbox: what rounds have brought to requests, until it is sent.

A round of a small model takes a third of a millisecond. A message for each, and a chunk for each of its requests, would keep
the client busier than the engine. So rounds are sent together, and those of one request become one. A request's first and
last tokens go at once.
"""

from __future__ import annotations

import time

from foreword.serve.messages import Progress

SEND_EVERY_S = 0.004
MOST_PER_S = 2000  # chunks of all requests together: the client can write about three times as many


class Outbox:
    """The progress of requests that is not sent yet. `is_urgent`: it must not wait for further rounds."""

    def __init__(self) -> None:
        self.is_urgent = False
        self.last_sent = 0.0
        self._progress: list[Progress] = []
        self._latest: dict[int, Progress] = {}  # of each request

    def add(self, progress: Progress) -> None:
        """Add what a round brought to a request."""
        self.is_urgent |= progress.begun is not None or progress.ended is not None
        latest = self._latest.get(progress.number)
        if latest is not None and latest.can_join(progress):
            latest.join(progress)
            return
        self._progress.append(progress)
        self._latest[progress.number] = progress

    def is_due(self, running: int) -> bool:
        """Whether it is time to send. `running`: how many requests there are."""
        pause = max(SEND_EVERY_S, running / MOST_PER_S)
        return self.is_urgent or (bool(self._progress) and self.silence >= pause)

    @property
    def silence(self) -> float:
        """The seconds since something was sent."""
        return time.monotonic() - self.last_sent

    def taken(self) -> list[Progress]:
        """Return everything, to be sent now."""
        found, self._progress = self._progress, []
        self._latest.clear()
        self.is_urgent, self.last_sent = False, time.monotonic()
        return found
