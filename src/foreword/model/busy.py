"""Whether other programs take time from what is timed here: how long our threads wait for a core, how much of the cores
others use, and how fast this machine reads memory, which bounds a pass from below.

A machine that is evenly busy shows times that agree with each other, so that they alone tell nothing.
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
from foreword.model.measured import Figure, is_anew, machine_facts, recall
from foreword.ops.device import free_memory, host_computes, release_unused, synchronize

LOOKED_S = 0.3  # at what others do: thirty ticks of a core
OTHERS_AT_WORK = 0.2  # of the cores; below that the quickest of a few tries hardly knows of them
BUFFER, PIECE, SWEEPS = 2**28, 2**23, 3  # bytes: more than most caches hold; less than a turn on a core reads


class Waits:
    """The largest share of a block's time that one of our threads waited for a core which others held."""

    def __enter__(self) -> Self:
        self._since, self._before = time.perf_counter(), _waited()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._since
        waited = [now - self._before.get(thread, 0.0) for thread, now in _waited().items()]
        own = torch.get_num_threads() > cores()  # then they wait for each other
        self.share = 0.0 if own or seconds <= 0 else min(max(waited, default=0.0) / seconds, 1.0)

    @property
    def doubt(self) -> str:
        """Why what was timed in the block may be of a busy machine; nothing where it is not."""
        if self.share <= OTHERS_AT_WORK:
            return ""
        return f"a thread waited for a core {self.share:.0%} of the time, while other programs held it"


def _waited() -> dict[str, float]:
    """Seconds that each thread was ready to run and did not. Where the system does not tell, what this one did not run: who
    computes never sleeps."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a thread that has ended meanwhile
            continue
    return found or {"": time.perf_counter() - time.thread_time()}


def others_at_work() -> float:
    """The share of the cores that other programs use just now. This thread sleeps meanwhile."""
    before, own = _core_ticks(), time.process_time()
    started = time.perf_counter()
    time.sleep(LOOKED_S)
    after, own = _core_ticks(), time.process_time() - own
    seconds = time.perf_counter() - started
    total = sum(after[core][1] - before[core][1] for core in before.keys() & after.keys())
    if not total:  # no such file here: the mean of a minute
        return min(os.getloadavg()[0] / cores(), 1.0) if hasattr(os, "getloadavg") else 0.0
    used = sum(after[core][0] - before[core][0] for core in before.keys() & after.keys())
    return min(max(used / total - own / (seconds * cores()), 0.0), 1.0)


def _core_ticks() -> dict[str, tuple[int, int]]:
    """Of each core that we may use: ticks at work, and all."""
    ours = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    wanted = {f"cpu{number}" for number in ours}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = {name: [int(tick) for tick in counts[:8]] for name, *counts in lines if name in wanted}
    except (OSError, ValueError):
        return {}
    return {name: (sum(counts) - sum(counts[3:5]), sum(counts)) for name, counts in ticks.items()}  # 3, 4: idle


def busy_words(others: float, waited: float = 0.0) -> str:
    """What to say of a machine of which others used this share before we began, and on which a thread of ours then waited
    for that share of the time; nothing where both are small."""
    parts = [f"other programs used {others:.0%} of the cores"] if others > OTHERS_AT_WORK else []
    parts += [f"a thread waited for a core {waited:.0%} of the time"] if waited > OTHERS_AT_WORK else []
    return f"the machine was busy ({', and '.join(parts)})" if parts else ""


def read_speed(device: torch.device) -> float:
    """Bytes a second that this device reads at best, measured once on this machine."""
    if is_anew():
        _read_speed.cache_clear()
    return _read_speed(device, torch.get_num_threads())


@cache
def _read_speed(device: torch.device, threads: int) -> float:
    def measure(earlier: Figure | None) -> Figure:
        with Waits() as waits:
            found = _fastest_piece(device)
        release_unused(device)  # whoever allocates a cache asks for free memory first
        return Figure(max(found, earlier.value if earlier else 0.0), not waits.doubt, waits.doubt)

    return recall("bandwidth", machine_facts(device), measure, Figure.read).value


def _fastest_piece(device: torch.device) -> float:
    """By pieces so short that some of them are read between the turns of other programs."""
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
