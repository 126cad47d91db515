"""Temporary folders that are deleted even if their process is killed.

The process holds a lock inside its folder, which the system releases when the process ends in any way. The next process that
makes a folder of the same name deletes those whose locks are free. A process id would not do: containers that share a folder
for temporary files do not share process ids.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = "in-use.lock"
FRESH_S = 60.0  # a folder is made before its lock is taken, so a young one is left alone


class TemporaryFolder:
    """A folder that lasts until `delete` or the end of the process."""

    def __init__(self, name: str) -> None:
        """Make a folder whose name begins with `name`, after deleting those of killed processes."""
        _sweep(name)
        self.path = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._lock.acquire()

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _sweep(name: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        if _is_left(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    """Return whether a folder belongs to this user, and its process has ended."""
    try:
        about = folder.lstat()
        if about.st_uid != os.getuid() or time.time() - about.st_mtime < FRESH_S or not (folder / LOCK).is_file():
            return False
        with FileLock(folder / LOCK, timeout=0):
            return True
    except (OSError, Timeout):
        return False
