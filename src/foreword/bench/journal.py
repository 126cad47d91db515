"""What a run has done so far, on the disk: should it be cut, the same command goes on where it stood.

Out: `unfinished.jsonl` in the folder of the report, a line for each heat behind a first one that says which run it is. It is
gone when the report is written. A folder with an unfinished run of another kind is refused, and told what differs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreword.bench.contenders import Answer, Task
from foreword.bench.run import Heat, HeatPlace
from foreword.errors import InputError, StorageError
from foreword.files import parse_json

NAME = "unfinished.jsonl"


class Journal:
    def __init__(self, folder: Path | None, about: dict[str, Any], costs: dict[str, Any] | None = None) -> None:
        """`about` is what makes a run this run and no other; `costs` is what it chooses rows by, to the end: those that it
        began with. Without a folder nothing is kept."""
        self.file, self.costs = folder / NAME if folder is not None else None, costs
        self.heats: dict[HeatPlace, Heat] = {}
        if self.file is None:
            return
        about = json.loads(json.dumps(about))
        lines = _complete_lines(self.file)
        if lines:
            self._take_up(lines, about)
        self._write("".join(f"{line}\n" for line in lines or [json.dumps({**about, "costs": costs})]), "w")

    def _take_up(self, lines: list[str], about: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            before = dict(parse_json(lines[0], strict=False))
            self.costs = before.pop("costs", None)
            heats = [_read(line) for line in lines[1:]]
            self.heats = {heat.place: heat for heat in heats}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_journal(self.file, error) from error
        _check_same(self.file, before, about)

    def add(self, heat: Heat) -> None:
        if self.file is not None:
            self._write(json.dumps(asdict(heat)) + "\n", "a")

    def end(self) -> None:
        """The report is written: there is nothing to go on with."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _write(self, text: str, how: str) -> None:
        assert self.file is not None
        try:
            with self.file.open(how, encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise StorageError(
                f"{self.file} cannot be written ({error.strerror}); name another folder with --out"
            ) from error


def _complete_lines(file: Path) -> list[str]:
    """A run may be cut in the middle of a line: that heat is run again."""
    if not file.is_file():
        return []
    try:
        return file.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise _no_journal(file, error) from error


def _no_journal(file: Path, error: Exception) -> InputError:
    return InputError(f"{file} is no unfinished run ({error!r}); remove the file, or name another folder with --out")


def _check_same(file: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differing:
        raise InputError(
            f"{file} is an unfinished run with another {', another '.join(differing)}; give the command that began it, "
            "remove the file, or name another folder with --out"
        )


def _read(line: str) -> Heat:
    row = parse_json(line, strict=False)
    answers = {name: [Answer(**one) for one in given] for name, given in row["answers"].items()}
    tasks = [Task(one["prompt"], tuple(one["ids"]), one["index"]) for one in row["tasks"]]
    return Heat(HeatPlace(*row["place"]), row["suite"], row["group"], tasks, answers, row["seconds"])
