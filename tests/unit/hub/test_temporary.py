"""Temporary folders: deleted after their process has ended in any way; those of running processes stay."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from foreword.hub.temporary import FRESH_S, LOCK, TemporaryFolder


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # tempfile caches the folder here
    return tmp_path


def age(folder: Path) -> None:
    long_ago = time.time() - 2 * FRESH_S
    os.utime(folder, (long_ago, long_ago))


def test_a_folder_is_deleted_with_all_that_is_in_it(own_place: Path) -> None:
    folder = TemporaryFolder("some")
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").touch()
    assert folder.path.parent == own_place and folder.path.name.startswith("some-")
    folder.delete()
    folder.delete()
    assert not list(own_place.iterdir())


def test_the_folder_of_a_killed_process_is_deleted_and_that_of_a_running_one_is_not(
    own_place: Path, python: Callable[[str], list[str]]
) -> None:
    script = """
import time
from foreword.hub.temporary import TemporaryFolder
folder = TemporaryFolder("some")
(folder.path / "weights").touch()
print(folder.path, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(python(script), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        age(left)
        TemporaryFolder("some").delete()
        assert (left / "weights").exists()
        process.send_signal(signal.SIGKILL)
    assert (left / "weights").exists()
    age(left)
    TemporaryFolder("other").delete()
    assert left.exists()
    TemporaryFolder("some").delete()
    assert not left.exists()


def test_folders_that_are_young_or_of_another_kind_are_left_alone(own_place: Path) -> None:
    young, foreign, file = own_place / "some-young", own_place / "some-foreign", own_place / "some-file"
    for folder in (young, foreign):
        folder.mkdir()
    (young / LOCK).touch()
    age(foreign)
    file.touch()
    age(file)
    TemporaryFolder("some").delete()
    assert young.exists() and foreign.exists() and file.exists()
