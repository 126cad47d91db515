"""A benchmark as files: `results.json` with every timing, machine, commit and command; `report.md` with the tables.

In: a benchmark for each temperature and batch size. Out: one dictionary, `content`, which results.json holds. The pages are
made from it alone, so they can be made again. Batch 1 gives a table for each group of prompts. Larger batches give one table
each, and one more with the speed-ups by batch size and where each method stops paying.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import foreword
from foreword.bench.figures import Benchmark, Timing, failures, rows, stops_paying, tables
from foreword.bench.markdown import markdown
from foreword.bench.page import html
from foreword.bench.spec_bench import Runs, write_answers
from foreword.errors import InputError, StorageError
from foreword.files import parse_json, read_all
from foreword.model.cores import cpu_name

Content = dict[str, Any]


@dataclass(frozen=True)
class Extras:
    """What a report has in addition to its timings."""

    spec_bench: dict[str, Any] = field(default_factory=dict)
    roofline: dict[str, Any] = field(default_factory=dict)
    left_out: dict[int, int] = field(default_factory=dict)  # later turns, by batch
    warm_up_failed: dict[str, str] = field(default_factory=dict)
    costs: dict[str, Any] = field(default_factory=dict)  # the `CostCurve` that rows were chosen by
    needs_own_run: list[str] = field(default_factory=list)  # methods that must be timed in a run of their own
    drift_check: dict[str, Any] = field(default_factory=dict)  # passes timed before and after the run
    busy: dict[str, Any] = field(default_factory=dict)  # others' share of the cores, our share of waiting, a sentence


KEYS = {"needs_own_run": "apart", "drift_check": "pulse"}  # keys in results.json that differ from the names here
NO_EXTRAS = Extras()


def content(
    benchmarks: Sequence[Benchmark], about: Content, found: Sequence[Timing] = (), extras: Extras = NO_EXTRAS
) -> Content:
    """Return every figure except the single timings. The first temperature is at the top level, the others under
    `temperatures`."""
    first = benchmarks[0]
    by_temperature: dict[float, list[Benchmark]] = {}
    for benchmark in benchmarks:
        by_temperature.setdefault(benchmark.temperature, []).append(benchmark)
    of_first, *others = by_temperature.items()
    main = _temperature_content(of_first[1])
    refused = {row["contender"] for row in main["tables"].get("overall", ()) if row["speedup"] is None or row["noise"]}
    return {
        "about": about,
        "max_new_tokens": first.max_new_tokens,
        "base": first.base,
        "repeats": first.repeats,
        "temperature": first.temperature,
        **main,
        "temperatures": {f"{temperature:g}": _temperature_content(some) for temperature, some in others},
        "warm_up_s": {benchmark.batch: benchmark.warm_up_s for benchmark in of_first[1]},
        "failures": failures(found),
        **{KEYS.get(name, name): value for name, value in asdict(extras).items()},
        "spec_bench": {name: _without_speedups(name in refused, groups) for name, groups in extras.spec_bench.items()},
    }


def _temperature_content(benchmarks: Sequence[Benchmark]) -> Content:
    alone = [one for one in benchmarks if one.batch == 1]
    batches = {one.batch: rows(one) for one in benchmarks}
    ours = {batch: [row for row in table if row.contender != benchmarks[0].base] for batch, table in batches.items()}
    return {
        "tables": {name: _dicts(table) for one in alone for name, table in tables(one).items()},
        "batches": {batch: _dicts(table) for batch, table in batches.items()},
        "stops_paying": stops_paying(ours),
    }


def _dicts(table: Iterable[Any]) -> list[Content]:
    return [asdict(row) for row in table]


def _without_speedups(refused: bool, groups: Content) -> Content:
    """Remove the speed-ups if outputs differ or the speed-up is noise."""
    if not refused:
        return groups
    return {name: {key: value for key, value in one.items() if "speedup" not in key} for name, one in groups.items()}


def _compact(timing: Timing) -> Content:
    """Round times to microseconds and leave out defaults: a run has thousands of timings."""
    defaults = asdict(Timing("", "", "", 0, 0, 0.0, 0.0, 0))
    always = [one.name for one in fields(Timing) if one.default is MISSING and one.default_factory is MISSING]
    always.append("block")  # results of earlier versions have none and are recognised by that
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(timing).items()}
    return {name: value for name, value in rounded.items() if name in always or value != defaults[name]}


def write_report(found: Content, timings: Sequence[Timing], folder: Path, answers: Runs | None = None) -> list[Path]:
    """Write `results.json` with a line per timing, `report.md`, `report.html` and the answers; return the first three."""
    head = json.dumps(found, indent=1)
    lines = ",\n".join(f"  {json.dumps(_compact(timing))}" for timing in timings)
    contents = {
        "results.json": f'{head.removesuffix("}").rstrip()},\n "timings": [\n{lines}\n ]\n}}\n',
        "report.md": markdown(found),
        "report.html": html(found),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_answers(answers or [], folder)
    except OSError as error:
        raise StorageError(
            f"the report cannot be written to {folder} ({error.strerror}); name a folder that can be written"
        ) from error
    return [folder / name for name in contents]


def read_results(place: str | Path) -> Content:
    """Read a results.json or the folder that holds one, packed by xz or not, of this version or an earlier one."""
    file = Path(place) / "results.json" if os.path.isdir(place) else Path(place)
    try:
        packed = file.with_suffix(".json.xz")
        if os.path.isfile(packed) and not os.path.exists(file):
            file = packed
        with lzma.open(file) if file.suffix == ".xz" else file.open("rb") as text:
            found = parse_json(read_all(text), strict=False)
        if not (found["tables"] or found["batches"]):
            raise KeyError("tables")
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds no results of `foreword bench` ({error}); give its folder or file") from error
    return {"batches": {}, "failures": [], "temperature": 0.0, "repeats": 1, "timings": [], **found}


# Origin of the numbers --------------------------------------------------------------------------------------------------


def facts(device: torch.device | None = None, **more: Any) -> dict[str, Any]:
    """Return the origin of a result: command, commit, machine, versions. Without `device`, the machine is its GPU if any."""
    return {
        "command": shlex.join(["foreword", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "foreword": foreword.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        **more,
    }


def _machine(device: torch.device | None) -> str:
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {os.cpu_count()} cores"


def _commit() -> str:
    """Return the commit of the checkout that tracks this file. An installed package may lie in an unrelated checkout. The
    environment variable FOREWORD_COMMIT names the commit of a copy that has no history of its own."""
    if named := os.environ.get("FOREWORD_COMMIT"):
        return named
    if not _git("ls-files", Path(__file__).name):
        return "no checkout"
    return _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", ":/src") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
