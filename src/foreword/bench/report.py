"""A benchmark as files: `results.json` with every timing, machine, commit and command; `report.md` with the tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import foreword
from foreword.bench.run import Benchmark, Timing
from foreword.errors import StorageError

LOOKUP_GROUPS = ("summarization", "rag", "translation")


@dataclass(frozen=True)
class Row:
    """A contender over some prompts. Speeds are tokens over wall seconds, pooled, the prompt's reading included."""

    contender: str
    tokens: int
    tokens_per_second: float
    speedup: float
    tokens_per_round: float
    loop_share: float
    identical: int
    prompts: int


def rows(benchmark: Benchmark, wanted: list[str] | None = None) -> list[Row]:
    """A row per contender; the speed-up is over the benchmark's base."""
    speed = {name: _speed(benchmark.of(name, wanted)) for name in benchmark.contenders}
    return [_row(name, benchmark.of(name, wanted), speed[name] / speed[benchmark.base]) for name in speed]


def _row(name: str, timings: list[Timing], speedup: float) -> Row:
    tokens, rounds = sum(t.tokens for t in timings), sum(t.rounds for t in timings)
    return Row(
        contender=name,
        tokens=tokens,
        tokens_per_second=_speed(timings),
        speedup=speedup,
        tokens_per_round=tokens / max(rounds, 1),
        loop_share=sum(t.loop_share * t.tokens for t in timings) / max(tokens, 1),
        identical=sum(t.same_as_first for t in timings),
        prompts=len(timings),
    )


def _speed(timings: list[Timing]) -> float:
    return sum(t.tokens for t in timings) / sum(t.seconds for t in timings)


def tables(benchmark: Benchmark) -> dict[str, list[Row]]:
    """Overall, the groups where text is copied from the prompt, and each group."""
    found: dict[str, list[Row]] = {"overall": rows(benchmark)}
    copied = [group for group in benchmark.groups if group in LOOKUP_GROUPS]
    if len(copied) > 1:
        found[" + ".join(copied)] = rows(benchmark, copied)
    if len(benchmark.groups) > 1:
        found |= {group: rows(benchmark, [group]) for group in benchmark.groups}
    return found


def facts(**more: Any) -> dict[str, Any]:
    """Where a number comes from: command, commit, machine, versions."""
    return {
        "command": shlex.join(["foreword", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            "foreword": foreword.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        **more,
    }


def write_report(benchmark: Benchmark, folder: Path, **more: Any) -> None:
    about = facts(**more)
    found = tables(benchmark)
    content = {
        "about": about,
        "max_new_tokens": benchmark.max_new_tokens,
        "base": benchmark.base,
        "tables": {name: [asdict(row) for row in table] for name, table in found.items()},
        "timings": [asdict(timing) for timing in benchmark.timings],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(markdown(found, about, benchmark), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the report cannot be written to {folder} ({error.strerror}); name a folder that can be written"
        ) from error


def markdown(found: dict[str, list[Row]], about: dict[str, Any], benchmark: Benchmark) -> str:
    where = [about["machine"], f"{about['threads']} threads", about.get("dtype"), f"commit {about['commit']}", about["date"]]
    lines = [
        "# Benchmark",
        "",
        f"`{about['command']}`",
        "",
        f"{', '.join(part for part in where if part)}. Greedy, at most {benchmark.max_new_tokens} new tokens, one text at a "
        "time. Speeds are tokens over wall seconds, the reading of the prompt included. Loop share: tokens inside an 8-gram "
        "that the answer already had.",
    ]
    head = f"| contender | tokens/s | over {benchmark.base} | tokens a round | loop share | same text as the first |"
    for name, table in found.items():
        lines += ["", f"## {name}", "", head, "|---|---|---|---|---|---|"]
        lines += [
            f"| {row.contender} | {row.tokens_per_second:.1f} | {row.speedup:.2f}x | {row.tokens_per_round:.2f} | "
            f"{row.loop_share:.0%} | {row.identical} of {row.prompts} |"
            for row in table
        ]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout that this file belongs to; an installed package may lie inside somebody else's."""
    if not _git("ls-files", Path(__file__).name):
        return "no checkout"
    return _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", ":/src") else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
