"""Loops compiled by Numba, with their machine code cached on disk, so that only the first load on a machine compiles.

Numba caches it next to the source or in the user's cache folder. In a read-only container it can write to neither: then the
code goes to `fallback_folder`. If that cannot be written either, every process compiles for itself.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from numba import cfunc, config, njit

from foreword.errors import ForewordWarning

fallback_folder: Path | None = None  # set it before a module with loops is imported

# Sums may be reordered, and divisions do not check for zero; infinities and NaN are kept.
_FLAGS = dict(fastmath={"reassoc", "contract", "arcp", "nsz"}, error_model="numpy", nogil=True)


def loop(signature):
    """Compile a function for one signature."""
    return partial(_compiled, partial(njit, signature, **_FLAGS))


def callback(signature):
    """Compile a function that is called by its address, as one of C. Its sums are computed in the order that is written."""
    return partial(_compiled, partial(cfunc, signature, error_model="numpy"))


def _compiled(compiler, function):
    for folder in (config.CACHE_DIR, str(fallback_folder or "")):
        with _cache_folder(folder):
            try:
                return compiler(cache=True)(function)
            except (RuntimeError, OSError):  # no writable folder, or a full disk
                continue
    _warn(fallback_folder)
    return compiler()(function)


@contextmanager
def _cache_folder(folder):
    """Let Numba try `folder` before its own. It chooses when a function is decorated: other functions are not affected."""
    before = config.CACHE_DIR
    config.CACHE_DIR = folder
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def _warn(folder):
    warnings.warn(
        f"Numba's machine code cannot be cached (neither {folder} nor Numba's own folders are writable), so every process "
        "compiles it again, which takes seconds; set FOREWORD_HOME or NUMBA_CACHE_DIR to a writable folder",
        ForewordWarning,
        stacklevel=2,
    )
