"""An interrupted run resumes; a run of another command is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword.bench import Contender
from foreword.bench.journal import NAME, Journal
from foreword.errors import InputError, StorageError
from foreword.text import Prompt

ABOUT = {"model": "tiny", "batch": (1, 4)}


@pytest.fixture
def block_runs(stub: Callable[..., Contender], measure: Any, questions: list[Prompt]) -> list[Any]:
    return list(measure([stub("plain"), stub("a", fails_at=("2",))], questions).block_runs.values())


def test_block_runs_are_read_back(block_runs: list[Any], tmp_path: Path) -> None:
    journal = Journal(tmp_path, ABOUT)
    assert not journal.block_runs
    for block_run in block_runs:
        journal.add(block_run)
    assert list(Journal(tmp_path, ABOUT).block_runs.values()) == block_runs


def test_an_incomplete_line_is_run_again(block_runs: list[Any], tmp_path: Path) -> None:
    journal = Journal(tmp_path, ABOUT)
    for block_run in block_runs[:2]:
        journal.add(block_run)
    with (tmp_path / NAME).open("a") as stream:
        stream.write('{"place": [1, 0.0,')
    again = Journal(tmp_path, ABOUT)
    assert list(again.block_runs.values()) == block_runs[:2]
    again.add(block_runs[2])
    assert list(Journal(tmp_path, ABOUT).block_runs.values()) == block_runs[:3]


def test_a_resumed_run_keeps_the_costs_it_began_with(block_runs: list[Any], tmp_path: Path) -> None:
    assert Journal(None, ABOUT, {"rows": [1]}).costs == {"rows": [1]}
    Journal(tmp_path, ABOUT, {"rows": [1]}).add(block_runs[0])
    again = Journal(tmp_path, ABOUT, {"rows": [2]})
    assert again.costs == {"rows": [1]} and list(again.block_runs.values()) == block_runs[:1]


def test_another_run_is_refused_with_what_differs(block_runs: list[Any], tmp_path: Path) -> None:
    Journal(tmp_path, ABOUT).add(block_runs[0])
    with pytest.raises(InputError, match="another model; give its command"):
        Journal(tmp_path, {**ABOUT, "model": "other"})


@pytest.mark.parametrize(
    "damaged",
    [
        "[" * 100_000,
        "{",
        "5",
        "[]",
        '{"place": 1}',
        '{"answers": [], "tasks": [], "place": []}',
        '"\\ud800"',
        "9" * 5000,
        "\xff",
    ],
    ids=lambda text: text[:20],
)
def test_a_damaged_file_is_named(damaged: str, block_runs: list[Any], tmp_path: Path) -> None:
    Journal(tmp_path, ABOUT).add(block_runs[0])
    first, second = (tmp_path / NAME).read_text().splitlines()
    for lines in ((damaged, second), (first, damaged)):
        (tmp_path / NAME).write_text("\n".join(lines) + "\n", encoding="latin-1")
        with pytest.raises(InputError, match="another model|is not the journal of an unfinished run .*remove the file"):
            Journal(tmp_path, ABOUT)


def test_the_journal_is_removed_at_the_end(tmp_path: Path, block_runs: list[Any]) -> None:
    journal = Journal(tmp_path, ABOUT)
    assert json.loads((tmp_path / NAME).read_text()) == {"model": "tiny", "batch": [1, 4], "costs": None}
    journal.end()
    assert not list(tmp_path.iterdir())
    nowhere = Journal(None, ABOUT)
    nowhere.add(block_runs[0])
    nowhere.end()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="name another folder"):
        Journal(tmp_path / "missing", ABOUT)
