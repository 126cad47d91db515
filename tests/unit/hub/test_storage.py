"""The cache folder: found, writable, checked for room, and never with incomplete folders."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from foreword.errors import InputError, StorageError
from foreword.hub.storage import check_empty, home, once, place, room


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))


def test_home_follows_the_environment(monkeypatch, tmp_path):
    assert home() == tmp_path / "home"
    monkeypatch.setenv("FOREWORD_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home() == tmp_path / "xdg" / "foreword"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert home() == tmp_path / "me" / ".cache" / "foreword"
    monkeypatch.setenv("FOREWORD_HOME", "~/mine")
    assert home() == tmp_path / "me" / "mine"
    assert home().is_dir()


def test_an_unwritable_home_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StorageError, match=r"file/home.*set FOREWORD_HOME"):
        home()
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write anywhere
    with pytest.raises(StorageError, match="permission denied"):
        home()


@pytest.mark.parametrize("in_the_way", ["models", "models/tiny", "locks", "."])
def test_a_file_in_place_of_a_folder_is_named(in_the_way, tmp_path):
    file = tmp_path / "home" / in_the_way
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    with pytest.raises(StorageError, match=rf"because {file} is a file; move that away, or set FOREWORD_HOME"):
        once(tmp_path / "home" / "models" / "tiny", lambda folder: None)
    assert file.is_file()


def test_a_folder_that_cannot_be_filled_is_named(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "none" / "weights").write_text("")

    with pytest.raises(StorageError, match=r"models/tiny cannot be written \(No such file"):
        once(tmp_path / "home" / "models" / "tiny", fill)


def test_a_home_of_nobody_is_a_folder_of_that_name(monkeypatch):
    monkeypatch.setenv("FOREWORD_HOME", "~nobody-at-all/foreword")
    assert place() == Path("~nobody-at-all/foreword")


def test_room_is_checked_before_and_during(tmp_path):
    with pytest.raises(StorageError, match=f"{1 << 60} bytes are needed"), room(tmp_path, 1 << 60):
        pytest.fail("began without room")
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(StorageError, match="1234 bytes are needed"), room(tmp_path, 1234):
        with Path("/dev/full").open("wb") as full:
            full.write(b"x")
            full.flush()
    with pytest.raises(FileNotFoundError), room(tmp_path, 1234):
        (tmp_path / "none").read_bytes()


def test_a_folder_of_the_user_that_cannot_be_read(tmp_path):
    for name in ("x" * 300, "y" * 5000):
        with pytest.raises(InputError, match="cannot be used .*name a new or an empty folder"):
            check_empty(tmp_path / name)


def test_once_is_once(tmp_path):
    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("all of them")

    for _ in range(2):
        assert once(tmp_path / "home" / "models" / "tiny", fill) == tmp_path / "home" / "models" / "tiny"
    assert len(calls) == 1
    assert (tmp_path / "home" / "models" / "tiny" / "weights").read_text() == "all of them"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(tmp_path, interruption):
    def fill(folder: Path) -> None:
        (folder / "weights").write_text("half of th")
        raise interruption

    with pytest.raises(interruption):
        once(tmp_path / "home" / "tiny", fill)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["locks"]


def test_the_rest_of_a_killed_process_is_deleted(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "new").touch()

    left = tmp_path / "home" / "tiny.building"
    left.mkdir(parents=True)
    (left / "old").touch()
    assert [path.name for path in once(tmp_path / "home" / "tiny", fill).iterdir()] == ["new"]
    assert not left.exists()


def test_a_second_process_waits_for_the_first(python, tmp_path):
    script = """
from pathlib import Path
from foreword.hub.storage import once

def fill(folder):
    print("filling", flush=True)
    sys.stdin.readline()
    (folder / "done").touch()

print(sorted(path.name for path in once(Path(sys.argv[1]), fill).iterdir()))
"""
    command = [*python(script), str(tmp_path / "home" / "tiny")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "filling\n"
        with subprocess.Popen(command, **pipes) as second:
            assert "waiting" in second.stderr.readline()
            assert first.communicate("go\n")[0] == "['done']\n"
            assert second.communicate()[0] == "['done']\n"


def test_two_threads_fill_once(tmp_path):
    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.05)

    threads = [threading.Thread(target=once, args=(tmp_path / "home" / "tiny", fill)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
