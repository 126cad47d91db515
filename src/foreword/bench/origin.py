"""Where a number comes from: the command, the commit, the machine and the versions that stand beside it in every file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import foreword


def facts(**more: Any) -> dict[str, Any]:
    """Where a number comes from: command, commit, machine, versions."""
    return {
        "command": shlex.join(["foreword", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "foreword": foreword.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        **more,
    }


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout that this file belongs to; an installed package may lie inside somebody else's."""
    if not _git("ls-files", Path(__file__).name):
        return "no checkout"
    return _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", ":/src") else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
