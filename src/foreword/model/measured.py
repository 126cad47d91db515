"""What was measured on this machine, kept under `place()`: measured once, and the same at every load.

In: facts that are the same at every load, and a function that measures. Out: what it gave, now or earlier. What may be of a
busy machine (`steady` is false) is kept for an hour, and never in place of something that is not. Of several processes one
measures at a time: they would take each other for a busy machine. Inside `anew()` nothing that was kept is believed.
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
from typing import Any, Protocol, TypeVar

import torch
from filelock import FileLock, Timeout

from foreword.errors import ForewordWarning, StorageError
from foreword.files import read_json
from foreword.hub.storage import home, place
from foreword.model.cores import cores, cpu_name
from foreword.ops.device import name_of

FORMAT = 2  # of what is kept, and of how it is measured: another one is measured anew
SUSPECT_S = 3600.0  # how long that is trusted which may be of a busy machine
OTHERS_S = 120.0  # how long another process may measure before we do so next to it

Facts = dict[str, object]


class Measured(Protocol):
    """A dataclass of what JSON has."""

    @property
    def steady(self) -> bool: ...
    @property
    def suspect(self) -> str: ...


Found = TypeVar("Found", bound=Measured)
Read = Callable[[dict[str, Any]], Found]


@dataclass
class Anew:
    """What was measured since somebody asked for it, and what speaks against it."""

    files: set[Path] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)


_anew: ContextVar[Anew | None] = ContextVar("_anew", default=None)
_measuring: ContextVar[bool] = ContextVar("_measuring", default=False)


@contextmanager
def anew() -> Iterator[None]:
    """Measure everything that is asked for in this block once more, and replace what was kept. Within another such block
    nothing is measured twice."""
    if is_anew():
        yield
        return
    asked = Anew()
    token = _anew.set(asked)
    try:
        yield
    finally:
        _anew.reset(token)
    if asked.doubts:
        _complain(
            f"the machine seems to be busy: {asked.doubts[0]}. Costs that were kept of a quiet machine stay, what was "
            "measured now is kept for an hour; remeasure when the machine is quiet"
        )


def is_anew() -> bool:
    return _anew.get() is not None


def recall(
    folder: str, facts: Facts, measure: Callable[[Found | None], Found], read: Read[Found], quiet: bool = False
) -> Found:
    """What was measured under these facts, else what `measure` gives; it is handed what was kept and is not believed.
    `quiet`: what may be of a busy machine is not believed, however recent it is."""
    file = file_of(folder, facts)
    if (found := _believed(file, read, quiet)) is not None:
        return found
    with _alone():
        if (found := _believed(file, read, quiet)) is not None:  # another process measured while we waited
            return found
        kept = read_kept(file, read)
        found = measure(kept)
        if asked := _anew.get():
            asked.files.add(file)
            asked.doubts += [found.suspect] if not found.steady else []
        if kept is not None and kept.steady and not found.steady:
            return kept
        keep(file, {"what": facts, **asdict(found)})  # type: ignore[call-overload]
        return found


def _believed(file: Path, read: Read[Found], quiet: bool) -> Found | None:
    asked = _anew.get()
    if asked is not None and file not in asked.files:
        return None
    kept = read_kept(file, read)
    if kept is None or kept.steady:
        return kept
    with suppress(OSError):
        if not quiet and time.time() - file.stat().st_mtime < SUSPECT_S:
            return kept
    return None


def read_kept(file: Path, read: Read[Found]) -> Found | None:
    """What a file holds, whether or not it is to be believed; None where it holds nothing that can be used."""
    try:
        return read(read_json(file))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def file_of(folder: str, facts: Facts) -> Path:
    mark = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return place() / folder / f"{mark}.json"


def machine_facts(device: torch.device) -> Facts:
    """What is the same at every load on this machine with this many threads. Not the host's name: a container has another
    one each time."""
    return {
        "device": [device.type, name_of(device) or cpu_name(), cores()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "format": FORMAT,
    }


def keep(file: Path, content: dict[str, Any]) -> None:
    """For the next load. Where nothing can be written what is in hand is as good, so that is no error."""
    written = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    try:
        home()
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(written, file)
    except (OSError, StorageError) as error:
        _complain(f"costs are measured at every load: {error}")
        with suppress(OSError):
            written.unlink()


def _complain(words: str) -> None:
    warnings.warn(words, ForewordWarning, stacklevel=1)  # one place, so that the same words are shown once


@contextmanager
def _alone() -> Iterator[None]:
    """While no other process measures under the same home, where that can be told. Who measures may ask for something else
    that has to be measured first."""
    token = _measuring.set(True)
    try:
        with nullcontext() if token.old_value is True else _lock():
            yield
    finally:
        _measuring.reset(token)


def _lock() -> AbstractContextManager[object]:
    try:
        locks = home() / "locks"
        locks.mkdir(exist_ok=True)
        return FileLock(locks / "measuring.lock").acquire(timeout=OTHERS_S)
    except (OSError, StorageError, Timeout, NotImplementedError):  # the last: a file system without locks
        return nullcontext()


@dataclass(frozen=True)
class Figure:
    """A single number."""

    value: float
    steady: bool = True
    suspect: str = ""

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"no figure: {self.value}")

    @staticmethod
    def read(kept: dict[str, Any]) -> Figure:
        """From what `asdict` made of one, by way of JSON."""
        return Figure(kept["value"], kept["steady"], kept["suspect"])
