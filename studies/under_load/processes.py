"""What the system counts of a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """What a process holds. `rss_mib`: memory that is resident. `cpu_s`: processor time that it has used so far."""

    descriptors: int
    threads: int
    rss_mib: float
    cpu_s: float


def held(process: int) -> Held:
    """Return what a process holds now."""
    folder = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    return Held(
        descriptors=len(os.listdir(folder / "fd")),
        threads=int(status["Threads"]),
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        cpu_s=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
    )
