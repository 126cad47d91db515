"""Foreword's own folder on disk: where it is, whether there is room, and how folders are made in it.

In: the name of a folder, and a function that fills it. Out: that folder, complete. One process at a time fills it under
another name and renames it when it is complete. So a folder under its own name can be trusted, whatever was interrupted
before.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from foreword.errors import InputError, StorageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def place() -> Path:
    """Return the path of the cache folder, whether or not it exists yet."""
    if own := os.environ.get("FOREWORD_HOME"):
        return Path(os.path.expanduser(own))  # pathlib's raises if there is no such home
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "foreword"


def home() -> Path:
    """Return the cache folder; make it if it does not exist, and refuse one that cannot be written."""
    folder = place()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error.strerror) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(folder, "permission denied")
    return folder


def _unwritable(folder: Path, reason: str | None) -> StorageError:
    above = (folder, *folder.parents)
    in_the_way = next((place for place in above if os.path.exists(place) and not os.path.isdir(place)), None)
    if in_the_way is not None:
        reason = f"the cache folder {folder} cannot be made, because {in_the_way} is a file"
        return StorageError(f"{reason}; move that away, or set FOREWORD_HOME to a folder that can be written")
    return StorageError(
        f"the cache folder {folder} cannot be written ({reason}); set FOREWORD_HOME to a folder that can be written"
    )


@contextmanager
def room(folder: Path, needed: int) -> Iterator[None]:
    """Refuse to begin without `needed` free bytes, and raise the same error if the disk fills up meanwhile."""
    if shutil.disk_usage(folder).free < needed:
        raise _full(folder, needed)
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _full(folder, needed) from error
        raise


def _full(folder: Path, needed: int) -> StorageError:
    free = shutil.disk_usage(folder).free
    return StorageError(
        f"the disk is too full: {needed} bytes are needed in {folder}, {free} are free; "
        "delete something, or set FOREWORD_HOME to a folder on a larger disk"
    )


def once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return `folder`, after `fill` has filled it if it did not exist. One of several processes does the work, and the
    others wait."""
    if not os.path.isdir(folder):
        with _alone(folder.name):
            if not os.path.isdir(folder):
                _build(folder, fill)
    return folder


@contextmanager
def _alone(name: str) -> Iterator[None]:
    locks = home() / "locks"
    lock = FileLock(locks / f"{name}.lock")
    try:
        locks.mkdir(exist_ok=True)
        _acquire(lock, name)
    except OSError as error:
        raise _unwritable(locks, error.strerror) from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock, name: str) -> None:
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(f"waiting for another process that is preparing {name}", file=sys.stderr)
        lock.acquire()


def _build(folder: Path, fill: Callable[[Path], None]) -> None:
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # a process that was killed could not clean up
    try:
        building.mkdir(parents=True)
        fill(building)
        os.replace(building, folder)
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def check_empty(folder: Path) -> None:
    """Refuse a folder of the user that is not empty."""
    try:
        taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:  # no valid name of a folder, or no permission
        raise InputError(f"{folder} cannot be used ({error.strerror}); name a new or an empty folder") from error
    if taken:
        raise InputError(f"{folder} is there already and is not empty; name a new or an empty folder")


def fill_empty(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder of the user, completely or not at all."""
    check_empty(folder)
    building = folder.resolve().with_name(f".{folder.resolve().name}.{os.getpid()}")
    try:
        building.mkdir(parents=True)
        fill(building)
        os.replace(building, folder)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder} cannot be written ({error}); make room, or name another folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
