"""Whether other programs slow down what is timed here: how long our threads wait for a core, how much of the cores other
programs use, and how fast this machine reads memory, which bounds a pass from below.

On a machine that is evenly busy, repeated timings agree with each other, so their spread alone does not show it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

import torch

from foreword.model.cores import cores
from foreword.model.measured import Figure, is_remeasuring, machine_facts, recall
from foreword.ops.device import free_memory, host_computes, release_unused, synchronize

SAMPLE_S = 0.3  # how long the load of other programs is sampled: thirty ticks of a core
BUSY_SHARE = 0.2  # of the cores or of the time; below that the fastest of a few timings is hardly affected
BUFFER, PIECE, SWEEPS = 2**28, 2**23, 3  # bytes: more than most caches hold; less than a time slice of a core reads


class Waits:
    """Measures the largest share of a block's time that one of our threads waited for a core held by another program."""

    def __enter__(self) -> Self:
        self._since, self._before = time.perf_counter(), _waited()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._since
        waited = [now - self._before.get(thread, 0.0) for thread, now in _waited().items()]
        too_many = torch.get_num_threads() > cores()  # then our threads wait for each other
        self.share = 0.0 if too_many or seconds <= 0 else min(max(waited, default=0.0) / seconds, 1.0)

    @property
    def doubt(self) -> str:
        """Why the machine may have been busy during the block, or an empty string."""
        if self.share <= BUSY_SHARE:
            return ""
        return f"a thread waited for a core {self.share:.0%} of the time, while other programs held it"


def _waited() -> dict[str, float]:
    """Return the seconds that each thread was ready to run but had no core. If the system does not report them, return the
    seconds that this thread did not run: a thread that computes never sleeps."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue
    return found or {"": time.perf_counter() - time.thread_time()}


def others_at_work() -> float:
    """Return the share of the cores that other programs use now. This thread sleeps while it is sampled."""
    before, own = _core_ticks(), time.process_time()
    started = time.perf_counter()
    time.sleep(SAMPLE_S)
    after, own = _core_ticks(), time.process_time() - own
    seconds = time.perf_counter() - started
    total = sum(after[core][1] - before[core][1] for core in before.keys() & after.keys())
    if not total:  # no /proc/stat here: the mean load of the last minute
        return min(os.getloadavg()[0] / cores(), 1.0) if hasattr(os, "getloadavg") else 0.0
    used = sum(after[core][0] - before[core][0] for core in before.keys() & after.keys())
    return min(max(used / total - own / (seconds * cores()), 0.0), 1.0)


def _core_ticks() -> dict[str, tuple[int, int]]:
    """Return the busy ticks and all ticks of each core that we may use."""
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    names = {f"cpu{number}" for number in ours}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = {name: [int(tick) for tick in counts[:8]] for name, *counts in lines if name in names}
    except (OSError, ValueError):
        return {}
    return {name: (sum(counts) - sum(counts[3:5]), sum(counts)) for name, counts in ticks.items()}  # 3, 4: idle


def busy_message(others: float, waited: float = 0.0) -> str:
    """Return a message that the machine was busy, or an empty string. `others`: the share of the cores that other programs
    used before we began. `waited`: the share of the time that a thread of ours then waited for a core."""
    reasons = [f"other programs used {others:.0%} of the cores"] if others > BUSY_SHARE else []
    reasons += [f"a thread waited for a core {waited:.0%} of the time"] if waited > BUSY_SHARE else []
    return f"the machine was busy ({', and '.join(reasons)})" if reasons else ""


def read_speed(device: torch.device) -> float:
    """Return the bytes per second that this device reads at best, measured once on this machine."""
    if is_remeasuring():
        _read_speed.cache_clear()
    return _read_speed(device, torch.get_num_threads())


@cache
def _read_speed(device: torch.device, threads: int) -> float:
    def measure(earlier: Figure | None) -> Figure:
        with Waits() as waits:
            found = _fastest_piece(device)
        release_unused(device)  # the next cache is allocated by how much memory is free
        return Figure(max(found, earlier.value if earlier else 0.0), not waits.doubt, waits.doubt)

    return recall("bandwidth", machine_facts(device), measure, Figure.read).value


def _fastest_piece(device: torch.device) -> float:
    """Return the fastest read speed of pieces so short that some are read while no other program interferes."""
    count = max(min(BUFFER, (free_memory(device) or BUFFER) // 4) // PIECE, 1)
    buffer = torch.ones(count, PIECE // 4, device=device)
    pieces = [*buffer] if host_computes(device) else [buffer]
    best = min(_seconds(piece.sum, device) for _ in range(SWEEPS) for piece in pieces)
    return pieces[0].numel() * pieces[0].itemsize / best


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started
