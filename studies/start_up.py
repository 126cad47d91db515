"""How soon a server answers: `python studies/start_up.py --out FILE` starts `foreword serve` again and again.

Timed from the start of the process: until /ready answers 200, and until the first chat is answered. The model is on disk.
First starts have a FOREWORD_HOME that knows nothing of this machine, so that the server measures it; later starts find what
was measured. With `--cold` the files of the interpreter's environment and of the model leave the page cache before each
start, as after a reboot. Give `--foreword` the program of another environment, such as a fresh install without extras.
Made results/start_up_cpu/starts.json.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
import typer

from foreword.hub.resolve import resolve
from study import write

MOST_S = 300.0
PROGRAM = Path(sys.executable).with_name("foreword")
ASK = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 1}


@contextmanager
def started(program: Path, home: Path, model: Path) -> Iterator[str]:
    """Start a server, and yield its address at once. Its messages are shown if it ends by itself."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [str(program), "serve", "--port", str(port), "--model", str(model)]
    with tempfile.TemporaryFile("w+") as messages:
        server = subprocess.Popen(command, stderr=messages, env={**os.environ, "FOREWORD_HOME": str(home)})
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            if server.poll() is not None:
                messages.seek(0)
                sys.stderr.write(messages.read())
            server.terminate()
            server.wait(60)


def one_start(program: Path, home: Path, model: Path) -> dict[str, float]:
    """Return the seconds until a server is ready, and until it has answered."""
    since = time.perf_counter()
    with started(program, home, model) as address:
        while not is_ready(address):
            if time.perf_counter() - since > MOST_S:
                raise RuntimeError(f"the server was not ready after {MOST_S:g} s")
            time.sleep(0.01)
        ready = time.perf_counter() - since
        body = json.dumps(ASK).encode()
        urlopen(Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"}), timeout=60).close()
        return {"ready_s": ready, "first_answer_s": time.perf_counter() - since}


def is_ready(address: str) -> bool:
    try:
        with urlopen(f"{address}/ready", timeout=5):
            return True
    except (URLError, ConnectionError):
        return False


def forget(*folders: Path) -> None:
    """Drop the files of folders from the page cache, as far as the system lets a user do so."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_up(
    out: Annotated[Path, typer.Option(help="Write the times to this JSON file.")],
    foreword: Annotated[Path, typer.Option(help="The program to start.")] = PROGRAM,
    model: Annotated[str | None, typer.Option(help="A model folder, file, name or id.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each kind.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Also start with files that are not in the page cache.")] = False,
) -> None:
    """Time starts of a server."""
    folder, found = resolve(model), []
    for kind in ("first", "later", *(["cold"] if cold else [])):
        with tempfile.TemporaryDirectory() as kept:
            starts = []
            for number in range(repeats + (kind != "first")):
                home = Path(kept) / str(number if kind == "first" else 0)
                if kind == "cold":
                    forget(foreword.parents[1], folder)
                starts.append(one_start(foreword, home, folder))
        counted = starts if kind == "first" else starts[1:]  # the first one measured the machine
        figures: dict[str, Any] = {name: median(one[name] for one in counted) for name in counted[0]}
        found.append({"start": kind, **figures, "all": counted})
        print(
            f"{kind}: ready after {figures['ready_s']:.2f} s, answered after {figures['first_answer_s']:.2f} s", flush=True
        )
    write(out, "starts", found, torch.device("cpu"), model=folder.name)


if __name__ == "__main__":
    typer.run(start_up)
