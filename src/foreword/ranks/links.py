"""Links: what the ranks say to each other outside of tensors, over sockets of this machine, and how they end together.

The first rank has two links to each of the others. Over one it sends what they are to do, in order. Over the other, the
lifeline, each side says every few seconds that it lives, and if it fails, why. A rank whose lifeline breaks or stays silent
is gone: then a thread ends this process with one message, even if it waits in a sum for that rank.
"""

from __future__ import annotations

import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

from foreword.errors import EngineError

ALIVE_EVERY_S = 5.0  # how often a rank says that it lives
SILENCE_S = 120.0  # after how much silence a rank counts as gone: it may be stopped, or hold the interpreter's lock
GRACE_S = 5.0  # when another rank fails, the first one has so long to raise an error of its own, such as the same
LAST_WORDS_S = 30.0  # how long a rank that failed waits for the first one to end
STATUS = 70  # exit status of a process that ends because another rank is gone
ALIVE, LEFT, QUIET = "alive", "left", "quiet"  # what lifelines carry besides reasons; the last: end, others say why


class Links:
    """The links of one rank."""

    def __init__(self, rank: int, count: int, orders: dict[int, Connection], lifelines: dict[int, Connection]) -> None:
        """By rank of the other side. The first rank has links to all others, which have one to the first."""
        self.rank, self.count = rank, count
        self.orders, self.lifelines = orders, lifelines
        self.failed = ""  # why no order can be followed any more
        self._ended, self._speaking = Event(), Lock()
        self._watcher = Thread(target=self._watch, name="foreword-ranks", daemon=True)
        self._watcher.start()

    def send(self, value: Any) -> None:
        """Send a value to all other ranks."""
        self.send_bytes(pickle.dumps(value))

    def send_bytes(self, value: bytes) -> None:
        if self.failed:
            raise EngineError(f"the ranks have ended: {self.failed}; start the program again")
        with self._ending():
            for link in self.orders.values():
                link.send_bytes(value)

    def receive(self) -> Any:
        """Return what the first rank sent next."""
        return pickle.loads(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        with self._ending():
            return self.orders[0].recv_bytes()

    def all_of(self, value: bool) -> bool:
        """Return whether a value is true on all ranks. After a failure nobody can be asked."""
        if self.failed:
            return False
        with self._ending():
            if self.rank:
                self.orders[0].send(value)
                return bool(self.receive())
            found = all([value, *[link.recv() for link in self.orders.values()]])  # a list: all must be received
            self.send(found)
            return found

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """If a link breaks inside this block, let the watcher end the process. Only if the other side left in order, the
        watcher returns, and the error goes on."""
        try:
            yield
        except (EOFError, OSError):
            self._watcher.join()
            raise

    def fail(self, reason: str) -> None:
        """Say that this rank fails. The first rank then reports it by an error of its own. Any other one waits for the
        first to end, so that one message comes from there, and ends."""
        if self.failed:
            return
        self.failed = reason
        if self.rank:
            self._say(f"rank {self.rank} of {self.count} failed: {reason}")
            self._watcher.join(LAST_WORDS_S)
            os._exit(STATUS)
        self._ended.set()
        self._say(QUIET)

    def close(self) -> None:
        """Say that this rank ends in order."""
        if not self._ended.is_set():
            self._ended.set()
            self._say(LEFT)

    def _say(self, message: str) -> None:
        with self._speaking:
            for link in self.lifelines.values():
                with suppress(OSError):  # the other side has gone already
                    link.send(message)

    def _watch(self) -> None:
        """Read and write the lifelines until this rank or another one ends."""
        heard, said = dict.fromkeys(self.lifelines, monotonic()), 0.0
        while not self._ended.is_set():
            if monotonic() - said >= ALIVE_EVERY_S:
                self._say(ALIVE)
                said = monotonic()
            ready = wait(list(self.lifelines.values()), ALIVE_EVERY_S)
            for rank, link in self.lifelines.items():
                if link in ready:
                    if not self._heard(rank, link):
                        return
                    heard[rank] = monotonic()
                elif monotonic() - heard[rank] > SILENCE_S:
                    self._end(f"rank {rank} of {self.count} has said nothing for {SILENCE_S:g} seconds")

    def _heard(self, rank: int, link: Connection) -> bool:
        """Read a lifeline. Return whether to go on."""
        try:
            message = link.recv()
        except (EOFError, OSError):
            self._end(f"rank {rank} of {self.count} is gone: its process was killed, or crashed")
            return False
        if message in (ALIVE, LEFT):
            return bool(message == ALIVE)
        if self.rank or not self._ended.wait(GRACE_S):
            self._end(message)
        return False

    def _end(self, reason: str) -> None:
        """End this process, because another rank is gone. One rank prints the reason: the first, or the second if it is the
        first that is gone."""
        if self._ended.is_set():
            return
        if self.rank == 0:
            self._say(QUIET)
        if self.rank <= 1 and reason != QUIET and not self.failed:
            os.write(2, f"\nForeword: {reason}. All ranks end.\n".encode())
        os._exit(STATUS)


def linked(rank: int, count: int, from_first: Callable[[Any], Any]) -> Links:
    """Link the ranks. `from_first`: gives every rank the value that the first one calls it with."""
    if rank:
        address, key = from_first(None)
        ends = []
        for kind in ("orders", "lifeline"):
            ends.append(Client(address, authkey=key))
            ends[-1].send((rank, kind))
        return Links(rank, count, {0: ends[0]}, {0: ends[1]})
    key = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(prefix="foreword-") as folder:
        address = str(Path(folder) / "ranks")
        with Listener(address, backlog=2 * count, authkey=key) as listener:
            from_first((address, key))
            found: dict[str, dict[int, Connection]] = {"orders": {}, "lifeline": {}}
            for _ in range(2 * (count - 1)):
                end = listener.accept()
                other, kind = end.recv()
                found[kind][other] = end
    return Links(rank, count, found["orders"], found["lifeline"])
