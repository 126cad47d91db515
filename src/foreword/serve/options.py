"""The options of a server, where API keys come from, and how they are kept. Nothing here needs the extra."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from foreword.errors import InputError

KEY_VARIABLE = "FOREWORD_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    """What `foreword serve` may be told. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000

    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    """`digest` of each API key. None: everyone may ask."""

    allow_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask; "*" is all of them."""

    served_names: tuple[str, ...] = ()
    """What clients may call the model; answers have the first. None: its own name."""

    max_queued: int = 256
    """The most outputs that wait for a slot. A request that would wait behind them is refused."""

    max_body: int = 8 << 20
    """Bytes of a request's body."""

    request_seconds: float = 600.0
    """The most time for one request, its wait included."""

    drain_seconds: float = 30.0
    """How long running requests may go on after a signal to stop."""

    keep_alive_seconds: float = 10.0
    """A stream without news sends a comment this often, so that no proxy takes it for dead."""

    page: bool = True
    """Serve the web page at /."""

    switch_methods: bool = False
    """POST /foreword/method may change the drafting method while nothing runs."""

    log_requests: bool = False
    """Log a line for each answer."""


def digest(key: str) -> bytes:
    """Return what is kept of an API key."""
    return sha256(key.encode()).digest()


def digests(file: Path | None) -> tuple[bytes, ...]:
    """Return the digests of the API keys in a file and in the environment, which is cleared for child processes."""
    keys = os.environ.pop(KEY_VARIABLE, "").split()
    if file is not None:
        try:
            keys += file.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {file}: {error}") from error
        if not keys:
            raise InputError(f"{file} has no key; write one per line")
    return tuple(map(digest, keys))
