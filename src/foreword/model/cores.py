"""CPU cores: their name, how many this process may use, and how to keep some of them free for another process."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def cores() -> int:
    """Return how many cores this process may use, not how many the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class ReservedCores:
    """Cores that are kept free for another process, by lowering torch's number of threads. Threads that wait for each other
    are slow if one of them has no core. `release` must be called by the thread that called `reserve`, since torch keeps its
    number of threads per calling thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: int | None = None  # torch's number of threads before `reserve`

    def reserve(self) -> None:
        threads, most = torch.get_num_threads(), max(cores() - self.count, 1)
        if self.count and self._before is None and most < threads:
            self._before = threads
            torch.set_num_threads(most)

    def release(self) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
