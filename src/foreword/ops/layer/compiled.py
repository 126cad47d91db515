"""Loops compiled by Numba, their machine code kept on disk, so that only the first load on a machine compiles.

Numba keeps it next to the source or in the user's cache folder. In a read-only container it can write to neither: then the
code goes to `spare`, and where that cannot be written either, every process compiles for itself.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from numba import config, njit

from foreword.errors import ForewordWarning

spare: Path | None = None  # set it before a module with loops is imported

# Sums may go in any order, a division need not look for zero; infinities and NaN stay what they are.
_FLAGS = dict(fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy", nogil=True)


def loop(signature):
    """Compile a function for one signature."""

    def compiled(function):
        for folder in (config.CACHE_DIR, str(spare or "")):
            with _kept_in(folder):
                try:
                    return njit(signature, cache=True, **_FLAGS)(function)
                except (RuntimeError, OSError):  # no place that can be written, or a disk that is full
                    continue
        _warn(spare)
        return njit(signature, **_FLAGS)(function)

    return compiled


@contextmanager
def _kept_in(folder):
    """Let Numba try `folder` before its own places. It chooses when a function is decorated: no other's is touched."""
    before = config.CACHE_DIR
    config.CACHE_DIR = folder
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def _warn(folder):
    warnings.warn(
        f"Numba's machine code cannot be kept ({folder} and Numba's own places cannot be written), so every process "
        "compiles it anew, which takes seconds; set FOREWORD_HOME or NUMBA_CACHE_DIR to a folder that can be written",
        ForewordWarning,
        stacklevel=2,
    )
