"""Start the other ranks of a model from one process, which becomes the first: for commands, which no torchrun has started.

Each of the others is a child process that loads the same model, serves the first rank, and ends when that closes the model.
If one ends before all have met, or the first one does, the rest end too.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from threading import Thread
from typing import Any

from foreword.api import LLM
from foreword.ranks.group import current, free_port, is_launched, launch_variables
from foreword.ranks.links import STATUS

PROGRAM = (sys.executable, "-m", "foreword.launch")


def start_others(options: dict[str, Any]) -> None:
    """Start all ranks but the first, if `options`, the arguments of `foreword.LLM`, ask for several and nobody has started
    them. Then `LLM(**options)` in this process is the first rank."""
    count = options.get("tp")
    if type(count) is not int or count < 2 or is_launched():
        return
    port = free_port()
    os.environ |= launch_variables(0, count, port)
    for rank in range(1, count):
        process = subprocess.Popen(PROGRAM, env=os.environ | launch_variables(rank, count, port), stdin=subprocess.PIPE)
        assert process.stdin is not None
        pickle.dump(options, process.stdin)
        process.stdin.flush()  # and it stays open: it closes when this process ends
        Thread(target=_watch, args=(process, rank, count), name=f"foreword-rank-{rank}", daemon=True).start()


def _watch(process: subprocess.Popen[bytes], rank: int, count: int) -> None:
    """End this process if another rank ends before all have met: later their links break, which `Links` sees."""
    status = process.wait()
    if status and current().links is None:
        message = f"rank {rank} of {count} ended while it loaded the model (exit status {status}); its messages say why"
        os.write(2, f"\nForeword: {message}. All ranks end.\n".encode())
        os._exit(STATUS)


def main() -> None:
    """Be one of the other ranks."""
    options = pickle.load(sys.stdin.buffer)
    Thread(target=_end_with_first, name="foreword-first-rank", daemon=True).start()
    LLM(**options)


def _end_with_first() -> None:
    """End this process if the first rank ends before all have met."""
    sys.stdin.buffer.read()
    if current().links is None:
        os._exit(STATUS)


if __name__ == "__main__":
    main()
