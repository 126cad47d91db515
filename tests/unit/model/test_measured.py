"""Measurements are stored by facts that do not change, in whole files, and for good only if the machine was quiet."""

import json
import os
import platform
import socket
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from foreword.errors import ForewordWarning
from foreword.model import measured
from foreword.model.measured import Figure, file_of, keep, machine_facts, read_kept, recall, remeasuring

QUIET, BUSY = True, False


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    return tmp_path


def shows(*figures: tuple[float, bool]) -> Callable[[], float]:
    """Return a function that measures these figures in sequence, and fails if it is called once more."""
    coming = [Figure(value, steady, "" if steady else "others were at work") for value, steady in figures]

    def ask(quiet: bool = False) -> float:
        return recall("figures", {"of": "a test"}, lambda _: coming.pop(0), Figure.read, quiet).value

    return ask


def test_measured_once() -> None:
    ask = shows((1.0, QUIET))
    assert [ask() for _ in range(3)] == [1.0] * 3


def test_a_measurement_of_a_busy_machine_is_never_kept_for_good(own: Path) -> None:
    ask = shows((9.0, BUSY), (8.0, BUSY), (1.0, QUIET))
    assert ask() == ask() == 9.0
    (file,) = own.glob("figures/*.json")
    for age, shown in (
        (0, 9.0),
        (measured.SUSPECT_S + 1, 8.0),
        (measured.SUSPECT_S + 1, 1.0),
        (10 * measured.SUSPECT_S, 1.0),
    ):
        os.utime(file, (time.time() - age,) * 2)
        assert ask() == shown
    assert json.loads(file.read_text())["steady"] is True


def test_remeasuring_measures_everything_once_and_replaces_it() -> None:
    ask = shows((1.0, QUIET), (2.0, QUIET))
    assert ask() == 1.0
    with remeasuring():
        assert ask() == ask() == 2.0
        with remeasuring():
            assert ask() == 2.0
    assert ask() == 2.0


def test_a_measurement_of_a_busy_machine_replaces_no_steady_one() -> None:
    ask = shows((1.0, QUIET), (9.0, BUSY))
    ask()
    with pytest.warns(ForewordWarning, match="seems to be busy: others were at work"), remeasuring():
        assert ask() == 1.0
    assert ask() == 1.0


def test_only_remeasuring_warns_of_a_busy_machine() -> None:
    ask = shows((9.0, BUSY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask() == 9.0


def test_a_new_measurement_gets_the_stored_one() -> None:
    seen: list[Figure | None] = []

    def measure(earlier: Figure | None) -> Figure:
        seen.append(earlier)
        return Figure(1.0, BUSY, "others were at work")

    for _ in range(2):
        recall("figures", {}, measure, Figure.read, quiet=True)
    assert seen == [None, Figure(1.0, BUSY, "others were at work")]


def test_machine_facts_do_not_include_the_host_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    first = machine_facts(cpu)
    monkeypatch.setattr(platform, "node", lambda: "another-container")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-container")
    assert machine_facts(cpu) == first
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert machine_facts(cpu) != first


@pytest.mark.parametrize("change", ["get_num_threads", "__version__", "device"])
def test_another_machine_has_its_own_measurements(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file_of("figures", machine_facts(torch.device("cpu")))}
    if change == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        files.add(file_of("figures", machine_facts(torch.device("cuda"))))
    else:
        monkeypatch.setattr(torch, change, (lambda: 77) if change == "get_num_threads" else "9.9")
        files.add(file_of("figures", machine_facts(torch.device("cpu"))))
    assert len(files) == 2


def test_another_format_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_of("figures", machine_facts(torch.device("cpu")))
    monkeypatch.setattr(measured, "FORMAT", measured.FORMAT + 1)
    assert file_of("figures", machine_facts(torch.device("cpu"))) != before


def test_many_writers_leave_a_whole_file(own: Path) -> None:
    file = own / "figures" / "one.json"
    keep(file, {"value": 0, "steady": True, "suspect": ""})

    def write(number: int) -> None:
        for turn in range(40):
            keep(file, {"value": number, "steady": True, "suspect": "x" * 1000 * (turn % 7)})
            assert read_kept(file, Figure.read) is not None

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert [one.name for one in file.parent.iterdir()] == ["one.json"]


def test_only_one_of_several_measures_at_a_time() -> None:
    """The others wait: at the same time each would find the machine busy."""
    at_work, most, lock = 0, 0, threading.Lock()

    def measure(_: Figure | None) -> Figure:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.05)
        with lock:
            at_work -= 1
        return Figure(1.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda kind: recall("figures", {"kind": kind % 2}, measure, Figure.read), range(4)))
    assert most == 1


def test_a_measurement_may_need_another_one_first() -> None:
    def measure(_: Figure | None) -> Figure:
        return Figure(1.0 + recall("others", {}, lambda _: Figure(1.0), Figure.read).value)

    assert recall("figures", {}, measure, Figure.read).value == 2.0


@pytest.fixture
def unwritable(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that cannot be made, by whoever runs the tests."""
    (own / "file").write_text("")
    monkeypatch.setenv("FOREWORD_HOME", str(own / "file" / "home"))
    return own


@pytest.mark.filterwarnings("ignore:costs are measured by every process")
@pytest.mark.usefixtures("unwritable")
def test_what_cannot_be_written_is_remembered_by_the_process() -> None:
    ask = shows((1.0, QUIET), (2.0, QUIET))
    assert [ask() for _ in range(3)] == [1.0] * 3
    with remeasuring():
        assert ask() == ask() == 2.0
    assert ask() == 2.0


@pytest.mark.filterwarnings("ignore:costs are measured by every process")
@pytest.mark.usefixtures("unwritable")
def test_what_is_remembered_of_a_busy_machine_is_used_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = shows((9.0, BUSY), (1.0, QUIET))
    assert ask() == ask() == 9.0
    later = time.time() + measured.SUSPECT_S + 1
    monkeypatch.setattr(measured.time, "time", lambda: later)
    assert ask() == ask() == 1.0


def test_what_is_remembered_gives_way_to_what_is_written(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = own / "figures" / "one.json"
    with monkeypatch.context() as full_disk, pytest.warns(ForewordWarning, match="measured by every process: .*full"):
        full_disk.setattr(measured.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        keep(file, Figure(1.0).to_dict())
    assert read_kept(file, Figure.read) == Figure(1.0)
    keep(file, Figure(2.0).to_dict())
    assert read_kept(file, Figure.read) == Figure(2.0)
    file.unlink()
    assert read_kept(file, Figure.read) is None


@pytest.mark.parametrize("text", ['{"value": -1, "steady": true, "suspect": ""}', '{"value": "a"}', "[1]", "{", "[" * 5000])
def test_a_damaged_file_counts_as_absent(text: str, own: Path) -> None:
    ask = shows((1.0, QUIET), (2.0, QUIET))
    ask()
    (file,) = own.glob("figures/*.json")
    file.write_text(text)
    assert ask() == ask() == 2.0
