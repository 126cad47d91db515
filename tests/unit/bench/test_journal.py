"""A run that was cut goes on; one of another kind is refused."""

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
def heats(stub: Callable[..., Contender], race: Any, questions: list[Prompt]) -> list[Any]:
    return list(race([stub("plain"), stub("a", fails_at=("2",))], questions).heats.values())


def test_heats_come_back_as_they_were(heats: list[Any], tmp_path: Path) -> None:
    journal = Journal(tmp_path, ABOUT)
    assert not journal.heats
    for heat in heats:
        journal.add(heat)
    assert list(Journal(tmp_path, ABOUT).heats.values()) == heats


def test_a_line_that_was_cut_is_run_again(heats: list[Any], tmp_path: Path) -> None:
    journal = Journal(tmp_path, ABOUT)
    for heat in heats[:2]:
        journal.add(heat)
    with (tmp_path / NAME).open("a") as stream:
        stream.write('{"place": [1, 0.0,')
    again = Journal(tmp_path, ABOUT)
    assert list(again.heats.values()) == heats[:2]
    again.add(heats[2])
    assert list(Journal(tmp_path, ABOUT).heats.values()) == heats[:3]


def test_a_run_that_goes_on_chooses_rows_by_the_costs_it_began_with(heats: list[Any], tmp_path: Path) -> None:
    assert Journal(None, ABOUT, {"rows": [1]}).costs == {"rows": [1]}
    Journal(tmp_path, ABOUT, {"rows": [1]}).add(heats[0])
    again = Journal(tmp_path, ABOUT, {"rows": [2]})
    assert again.costs == {"rows": [1]} and list(again.heats.values()) == heats[:1]


def test_another_run_is_refused_with_what_differs(heats: list[Any], tmp_path: Path) -> None:
    Journal(tmp_path, ABOUT).add(heats[0])
    with pytest.raises(InputError, match="another model; give the command that began it"):
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
def test_a_damaged_file_is_named(damaged: str, heats: list[Any], tmp_path: Path) -> None:
    Journal(tmp_path, ABOUT).add(heats[0])
    first, second = (tmp_path / NAME).read_text().splitlines()
    for lines in ((damaged, second), (first, damaged)):
        (tmp_path / NAME).write_text("\n".join(lines) + "\n", encoding="latin-1")
        with pytest.raises(InputError, match="another model|is no unfinished run .*remove the file"):
            Journal(tmp_path, ABOUT)


def test_the_end(tmp_path: Path, heats: list[Any]) -> None:
    journal = Journal(tmp_path, ABOUT)
    assert json.loads((tmp_path / NAME).read_text()) == {"model": "tiny", "batch": [1, 4], "costs": None}
    journal.end()
    assert not list(tmp_path.iterdir())
    nowhere = Journal(None, ABOUT)
    nowhere.add(heats[0])
    nowhere.end()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="name another folder"):
        Journal(tmp_path / "missing", ABOUT)
