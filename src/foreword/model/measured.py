"""Measurements of this machine, kept in the cache folder: each is taken once, and every load finds it again.

In: facts that are the same at every load, and a function that measures. Out: what it returned, now or earlier. A measurement
of a machine that may have been busy (`steady` is false) is kept for an hour and never replaces a steady one. One process at
a time measures, since two would each find the machine busy. Inside `remeasuring()`, stored measurements are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from filelock import FileLock, Timeout

from foreword.errors import ForewordWarning, StorageError
from foreword.files import read_json
from foreword.hub.storage import home, place
from foreword.model.cores import cores, cpu_name
from foreword.ops.device import name_of
from foreword.ranks.group import agreed, current

FORMAT = 2  # of the files and of how their content is measured; with another number everything is measured again
SUSPECT_S = 3600.0  # how long a measurement of a machine that may have been busy is used
LOCK_WAIT_S = 120.0  # how long to wait for another process that measures, before measuring at the same time

Facts = dict[str, object]


class Measured(Protocol):
    """The result of a measurement."""

    @property
    def steady(self) -> bool: ...
    @property
    def suspect(self) -> str: ...

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""


Found = TypeVar("Found", bound=Measured)
Stored = TypeVar("Stored")
Read = Callable[[dict[str, Any]], Found]


@dataclass
class Remeasurement:
    """The files measured again inside a `remeasuring()` block, and the reasons to doubt them."""

    files: set[Path] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)


class Unwritten(NamedTuple):
    """What could not be written to a file, and when it was measured."""

    content: dict[str, Any]
    time: float


_unwritten: dict[Path, Unwritten] = {}  # by file: the home may be read-only, and each load must find the same measurements
_remeasurement: ContextVar[Remeasurement | None] = ContextVar("_remeasurement", default=None)
_measuring: ContextVar[bool] = ContextVar("_measuring", default=False)


@contextmanager
def remeasuring() -> Iterator[None]:
    """Measure everything that is needed in this block once more, and replace what was stored. Inside another such block
    nothing is measured twice."""
    if is_remeasuring():
        yield
        return
    current = Remeasurement()
    token = _remeasurement.set(current)
    try:
        yield
    finally:
        _remeasurement.reset(token)
    if current.doubts:
        _warn(
            f"the machine seems to be busy: {current.doubts[0]}. Costs measured on a quiet machine stay; what was measured "
            "now is kept for an hour; remeasure when the machine is quiet"
        )


def is_remeasuring() -> bool:
    return _remeasurement.get() is not None


def recall(
    folder: str, facts: Facts, measure: Callable[[Found | None], Found], read: Read[Found], quiet: bool = False
) -> Found:
    """Return what was measured under these facts, or measure it now. `measure` gets the stored result if it is
    not trusted. `quiet`: do not trust a measurement of a machine that may have been busy, however recent it is."""
    file = file_of(folder, facts)
    if (found := agreed(_trusted(file, read, quiet))) is not None:
        return found
    with _measuring_alone():
        if (found := agreed(_trusted(file, read, quiet))) is not None:  # another process measured while we waited
            return found
        kept = agreed(read_kept(file, read))
        found = agreed(measure(kept))
        if current := _remeasurement.get():
            current.files.add(file)
            current.doubts += [found.suspect] if not found.steady else []
        if kept is not None and kept.steady and not found.steady:
            return kept
        keep(file, {"what": facts, **found.to_dict()})
        return found


def _trusted(file: Path, read: Read[Found], quiet: bool) -> Found | None:
    """Return what a file holds if it may be used now, or None."""
    current = _remeasurement.get()
    if current is not None and file not in current.files:
        return None
    kept = read_kept(file, read)
    if kept is None or kept.steady:
        return kept
    with suppress(OSError):
        remembered = _unwritten.get(file)
        measured_at = remembered.time if remembered else file.stat().st_mtime
        if not quiet and time.time() - measured_at < SUSPECT_S:
            return kept
    return None


def read_kept(file: Path, read: Callable[[dict[str, Any]], Stored]) -> Stored | None:
    """Return what a file holds, trusted or not, or None if it holds nothing that can be read. What this process could not
    write to the file counts as its content."""
    try:
        remembered = _unwritten.get(file)
        return read(remembered.content if remembered else read_json(file))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def file_of(folder: str, facts: Facts) -> Path:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return place() / folder / f"{digest}.json"


def machine_facts(device: torch.device) -> Facts:
    """Return what is the same at every load on this machine with this many threads. The host's name is not among it: a
    container gets another one each time."""
    return {
        "device": [device.type, name_of(device) or cpu_name(), cores()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "format": FORMAT,
    }


def keep(file: Path, content: dict[str, Any]) -> None:
    """Store a measurement for the next load. If it cannot be written, this process remembers it: that is only a warning. Of
    several ranks the first stores it."""
    if not current().is_first:
        return
    written = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        home()
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(written, file)
        _unwritten.pop(file, None)
    except (OSError, StorageError) as error:
        _unwritten[file] = Unwritten(content, time.time())
        _warn(f"costs are measured by every process: {error}")
        with suppress(OSError):
            written.unlink()


def _warn(message: str) -> None:
    warnings.warn(message, ForewordWarning, stacklevel=1)  # from one line, so that the same message is shown once


@contextmanager
def _measuring_alone() -> Iterator[None]:
    """Hold the lock that keeps other processes with the same home from measuring, if it can be had. A measurement may need
    another one first, which then shares the lock."""
    token = _measuring.set(True)
    try:
        with nullcontext() if token.old_value is True or not current().is_first else _lock():
            yield
    finally:
        _measuring.reset(token)


def _lock() -> AbstractContextManager[object]:
    try:
        locks = home() / "locks"
        locks.mkdir(exist_ok=True)
        return FileLock(locks / "measuring.lock").acquire(timeout=LOCK_WAIT_S)
    except (OSError, StorageError, Timeout, NotImplementedError):  # the last: a file system without locks
        return nullcontext()


@dataclass(frozen=True)
class Figure:
    """A measured number."""

    value: float
    steady: bool = True
    suspect: str = ""

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"no figure: {self.value}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(kept: dict[str, Any]) -> Figure:
        """Read what `to_dict` made, from JSON."""
        return Figure(kept["value"], kept["steady"], kept["suspect"])
