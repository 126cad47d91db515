"""The processes of a server: `foreword serve` and the engine below it, and what the system counts of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from under_load.client import Address

START_S = 120.0
END_S = 20.0
ADDRESS = re.compile(r"at http://([\d.]+):(\d+)")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    rss_mib: float
    cpu_s: float  # used so far


@dataclass(frozen=True)
class Served:
    """A server that runs. `log`: what it has written to stderr."""

    address: Address
    server: int  # process ids
    engine: int
    log: Path

    def held(self) -> dict[str, Held]:
        return {"server": held(self.server), "engine": held(self.engine)}


def held(process: int) -> Held:
    """Return what a process holds now."""
    folder = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Held(
        descriptors=len(os.listdir(folder / "fd")),
        threads=int(status["Threads"]),
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        cpu_s=(int(times[11]) + int(times[12])) / ticks,
    )


@contextmanager
def served(arguments: list[str]) -> Iterator[Served]:
    """Run `foreword serve` on a free port, with a cache folder of its own, and end it after the block."""
    command = [sys.executable, "-m", "foreword", "serve", "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as home:
        log = Path(home, "server.log")
        with log.open("wb") as errors:
            environment = {**os.environ, "FOREWORD_HOME": home, "COLUMNS": "200"}
            server = subprocess.Popen(command, stderr=errors, env=environment)
        try:
            address = _address(server, log)
            yield Served(address, server.pid, _child(server.pid), log)
        finally:
            server.terminate()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _address(server: subprocess.Popen[bytes], log: Path) -> Address:
    """Wait until a server is ready, and return its address."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        if found := ADDRESS.search(log.read_text()):
            return found[1], int(found[2])
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_S:g} s; it wrote: {log.read_text()[-2000:]}")


def _child(process: int) -> int:
    """Return the engine's process: the child of the server's main thread that runs the engine's module."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    for child in (int(one) for some in children for one in some.read_text().split()):
        if b"foreword.serve.engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise RuntimeError(f"process {process} has no engine below it")
