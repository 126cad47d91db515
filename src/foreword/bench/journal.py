"""The journal of a run on disk: after an interruption the same command continues where it stopped.

Out: `unfinished.jsonl` in the folder of the report. Its first line identifies the run; each further line is the run of one
block. The file is removed when the report is written. If the folder holds an unfinished run of another command, the run is
refused and the error names what differs.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foreword.bench.contenders import Answer, Task
from foreword.bench.run import BlockPlace, BlockRun
from foreword.errors import InputError, StorageError
from foreword.files import parse_json

NAME = "unfinished.jsonl"


class Journal:
    def __init__(self, folder: Path | None, about: dict[str, Any], costs: dict[str, Any] | None = None) -> None:
        """`about` identifies the run. `costs` are the measured costs that it chooses rows by; a resumed run keeps those it
        began with. Without a folder nothing is kept."""
        self.file, self.costs = folder / NAME if folder is not None else None, costs
        self.block_runs: dict[BlockPlace, BlockRun] = {}
        if self.file is None:
            return
        about = json.loads(json.dumps(about))
        lines = _complete_lines(self.file)
        if lines:
            self._resume(lines, about)
        self._write("".join(f"{line}\n" for line in lines or [json.dumps({**about, "costs": costs})]), "w")

    def _resume(self, lines: list[str], about: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            before = dict(parse_json(lines[0], strict=False))
            self.costs = before.pop("costs", None)
            block_runs = [_read(line) for line in lines[1:]]
            self.block_runs = {block_run.place: block_run for block_run in block_runs}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _no_journal(self.file, error) from error
        _check_same(self.file, before, about)

    def add(self, block_run: BlockRun) -> None:
        if self.file is not None:
            self._write(json.dumps(asdict(block_run)) + "\n", "a")

    def end(self) -> None:
        """Remove the journal: the report is written, so there is nothing to resume."""
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
    """Return the complete lines. A run may stop in the middle of a line; that block runs again."""
    if not file.is_file():
        return []
    try:
        return file.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise _no_journal(file, error) from error


def _no_journal(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file} is not the journal of an unfinished run ({error!r}); remove the file, or name another folder with --out"
    )


def _check_same(file: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if differing:
        raise InputError(
            f"{file} is the journal of an unfinished run with another {', another '.join(differing)}; give its command, "
            "remove the file, or name another folder with --out"
        )


def _read(line: str) -> BlockRun:
    row = parse_json(line, strict=False)
    answers = {name: [Answer(**one) for one in given] for name, given in row["answers"].items()}
    tasks = [Task(one["prompt"], tuple(one["ids"]), one["index"]) for one in row["tasks"]]
    return BlockRun(BlockPlace(*row["place"]), row["suite"], row["group"], tasks, answers, row["seconds"])
