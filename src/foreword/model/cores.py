"""CPU cores: what they are called, how many there are for this process, and leaving some to another while both work."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def cores() -> int:
    """Those this process may use, not those the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class LeftTo:
    """So many cores, left to another process: threads that wait for each other are slow where one of them has no core. What
    is left is taken back by the same thread, since torch counts threads for each thread that calls it."""

    def __init__(self, others: int) -> None:
        self.others = others
        self._before: int | None = None  # threads that we had

    def leave(self) -> None:
        threads, most = torch.get_num_threads(), max(cores() - self.others, 1)
        if self.others and self._before is None and most < threads:
            self._before = threads
            torch.set_num_threads(most)

    def take_back(self) -> None:
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
