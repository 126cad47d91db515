"""Processes of their own, as a user starts them, and two threads for those tests that write with the default model."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foreword

ROOT = Path(__file__).parents[2]
SOURCE = Path(foreword.__file__).parents[1]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Ours, with this source first; the libraries below keep quiet."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(SOURCE), *([inherited] if inherited else [])])
    return os.environ | {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error", "COLUMNS": "120"}


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python to its end: python("-m", "foreword", "methods", FOREWORD_HOME="/elsewhere")."""

    def run(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "cwd": ROOT}
        line = [sys.executable, *map(str, args)]
        return subprocess.run(line, env=environment | variables, check=False, **options)

    return run


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
