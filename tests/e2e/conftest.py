"""Processes of their own, as a user starts them, and a cache folder with the default model in it.

Everything runs on one thread, and what a row and a draft cost is measured in a second and kept however busy the machine
is: tests that share it with others would otherwise measure for minutes.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import foreword
from foreword.drafters.auto import expectations
from foreword.model import cost
from foreword.model.loading import load_stock, load_weights
from foreword.model.measured import file_of, keep
from foreword.model.model import Model

ROOT = Path(__file__).parents[2]
SOURCE = Path(foreword.__file__).parents[1]


@pytest.fixture(scope="session")
def model_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of our own: the user's copy of the default model, fetched if need be, and what its rows cost. The
    processes of one run of the tests share it."""
    root = tmp_path_factory.getbasetemp()
    home = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "model_home"
    with FileLock(home.with_suffix(".lock")):
        if not home.exists():
            _fill(home)
    return home


def _fill(home: Path) -> None:
    folder, unfinished = foreword.default_model(), home.with_suffix(".unfinished")
    unfinished.mkdir()
    (unfinished / "models").symlink_to(folder.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREWORD_HOME", str(unfinished))
        patch.setattr(cost.PassTimings, "steady", True)
        for load in (load_weights, load_stock):
            model = Model(load(folder, torch.device("cpu"), torch.float32))
            keep(file_of("costs", cost.facts_of(model)), cost.measure(model, rows=(1, 16)).curve().to_dict())
            expectations(model)
    unfinished.rename(home)


@pytest.fixture(scope="module")
def in_model_home(model_home: Path) -> Iterator[None]:
    """For tests that load the default model in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREWORD_HOME", str(model_home))
        patch.setenv("OMP_NUM_THREADS", "1")  # for engines in processes of their own
        yield


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Ours, with this source first; the libraries below keep quiet."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(SOURCE), *([inherited] if inherited else [])])
    ours = {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return os.environ | ours


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python to its end: python("-m", "foreword", "methods", FOREWORD_HOME="/elsewhere")."""

    def run(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "cwd": ROOT}
        line = [sys.executable, *map(str, args)]
        return subprocess.run(line, env=environment | variables, check=False, **options)

    return run
