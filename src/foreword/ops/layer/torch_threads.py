"""Run a compiled function on the threads of torch's own pool, so that torch and our loops never hold two pools that wait
actively for work and take the cores from each other.

In: a function of C with one address, and the number of threads. Out: nothing; all threads have returned. Torch computes on
GNU's OpenMP, whose entry point every compiler calls. Where it has another pool (macOS, Windows), one thread runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")  # where Linux lists the libraries of a process


def run(function: int, address: int, threads: int) -> None:
    """Call the function at an address of C, in `threads` threads together."""
    parallel = _pool() if threads > 1 else None
    if parallel is None:
        _callable(function)(address)
    else:
        parallel(function, address, threads, 0)


def thread_count() -> int:
    """Return how many threads `run` can use: those of torch."""
    return 1 if _pool() is None else torch.get_num_threads()


@cache
def _callable(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


@cache
def _pool() -> Callable[[int, int, int, int], None] | None:
    """Return the entry point of torch's OpenMP, or None if it has none that we know."""
    try:
        files = {line.split(maxsplit=5)[-1] for line in MAPS.read_text().splitlines() if "gomp" in line}
        (library,) = {file for file in files if "/torch" in file} or files  # numba may have loaded another one
        parallel = ctypes.CDLL(library).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel
