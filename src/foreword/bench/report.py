"""A benchmark as files: `results.json` with every timing, machine, commit and command; `report.md` with the tables.

In: one benchmark for each number of texts at once. One text at a time gives a table for each group of prompts; other numbers
give one more, a line each, with how far each method is ahead of plain decoding and where that ends.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
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
        identical=sum(t.identical for t in timings),
        prompts=sum(t.texts for t in timings),
    )


def _speed(timings: list[Timing]) -> float:
    return sum(t.tokens for t in timings) / sum(t.seconds for t in timings)


def tables(benchmarks: Sequence[Benchmark]) -> dict[str, list[Row]]:
    """Of one text at a time: overall, the groups where text is copied from the prompt, and each group."""
    alone = [one for one in benchmarks if one.batch == 1]
    if not alone:
        return {}
    benchmark = alone[0]
    found: dict[str, list[Row]] = {"overall": rows(benchmark)}
    copied = [group for group in benchmark.groups if group in LOOKUP_GROUPS]
    if len(copied) > 1:
        found[" + ".join(copied)] = rows(benchmark, copied)
    if len(benchmark.groups) > 1:
        found |= {group: rows(benchmark, [group]) for group in benchmark.groups}
    return found


def by_batch(benchmarks: Sequence[Benchmark]) -> dict[int, list[Row]]:
    return {benchmark.batch: rows(benchmark) for benchmark in benchmarks}


def stops_paying(batches: dict[int, list[Row]]) -> dict[str, int | None]:
    """By contender, the batch from which on it is never ahead; None: it is ahead in the largest that was tried."""
    ahead: dict[str, dict[int, bool]] = {}
    for batch, table in sorted(batches.items()):
        for row in table:
            ahead.setdefault(row.contender, {})[batch] = row.speedup > 1
    return {name: _first_behind(won) for name, won in ahead.items()}


def _first_behind(won: dict[int, bool]) -> int | None:
    last = max((batch for batch, ahead in won.items() if ahead), default=0)
    return min((batch for batch in won if batch > last), default=None)


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


def content(benchmarks: Sequence[Benchmark], about: dict[str, Any]) -> dict[str, Any]:
    """Every figure but the single timings."""
    batches = by_batch(benchmarks)
    return {
        "about": about,
        "max_new_tokens": benchmarks[0].max_new_tokens,
        "base": benchmarks[0].base,
        "tables": {name: [asdict(row) for row in table] for name, table in tables(benchmarks).items()},
        "batches": {batch: [asdict(row) for row in table] for batch, table in batches.items()},
        "stops_paying": stops_paying({batch: _others(table, benchmarks[0].base) for batch, table in batches.items()}),
        "warm_up_s": {benchmark.batch: benchmark.warm_up_s for benchmark in benchmarks},
    }


def write_report(benchmarks: Sequence[Benchmark], folder: Path, **more: Any) -> None:
    about = facts(**more)
    timings = [asdict(timing) for benchmark in benchmarks for timing in benchmark.timings]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content(benchmarks, about) | {"timings": timings}, indent=1)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        (folder / "report.md").write_text(markdown(benchmarks, about), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the report cannot be written to {folder} ({error.strerror}); name a folder that can be written"
        ) from error


def markdown(benchmarks: Sequence[Benchmark], about: dict[str, Any]) -> str:
    base, most = benchmarks[0].base, benchmarks[0].max_new_tokens
    where = [about.get("model"), about["machine"], f"{about['threads']} threads", about.get("dtype")]
    where += [f"commit {about['commit']}", about["date"]]
    lines = [
        "# Benchmark",
        "",
        f"`{about['command']}`",
        "",
        f"{', '.join(part for part in where if part)}. Greedy, at most {most} new tokens. Speeds are tokens over wall "
        "seconds, the reading of the prompt included. Loop share: tokens inside an 8-gram that the answer already had.",
    ]
    if "grown" in about:
        lines += ["", grown_words(about["grown"])]
    head = f"| contender | tokens/s | over {base} | tokens a round | loop share | same text as the first |"
    for name, table in tables(benchmarks).items():
        lines += ["", f"## {name}, one text at a time", "", head, "|---|---|---|---|---|---|"]
        lines += [
            f"| {row.contender} | {row.tokens_per_second:.1f} | {row.speedup:.2f}x | {row.tokens_per_round:.2f} | "
            f"{row.loop_share:.0%} | {row.identical} of {row.prompts} |"
            for row in table
        ]
    if [benchmark.batch for benchmark in benchmarks] != [1]:
        lines += _batch_lines(benchmarks, base)
    return "\n".join(lines) + "\n"


def _batch_lines(benchmarks: Sequence[Benchmark], base: str) -> list[str]:
    """A line for each number of texts at once: the base's speed, then each method's and how far it is ahead."""
    batches = by_batch(benchmarks)
    others = [name for name in benchmarks[0].contenders if name != base]
    heads = ["batch", f"{base}, tokens/s", *(f"{name}, {what}" for name in others for what in ("tokens/s", f"over {base}"))]
    lines = ["", "## by batch", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for batch, table in batches.items():
        row = {one.contender: one for one in table}
        cells = [f"{row[name].tokens_per_second:.1f} | {row[name].speedup:.2f}x" for name in others]
        lines.append(f"| {' | '.join([str(batch), f'{row[base].tokens_per_second:.1f}', *cells])} |")
    stops = stops_paying({batch: _others(table, base) for batch, table in batches.items()})
    lines += ["", *(f"- {stop_words(name, stop, batches)}" for name, stop in stops.items())]
    warm = [f"batch {one.batch}: {sum(one.warm_up_s.values()):.1f} s" for one in benchmarks]
    return [*lines, "", f"Warming up and capturing rounds, for all together and in no figure above: {', '.join(warm)}."]


def _others(table: list[Row], base: str) -> list[Row]:
    return [row for row in table if row.contender != base]


def stop_words(name: str, stop: int | None, batches: Collection[int]) -> str:
    if stop is None:
        return f"{name} still pays at batch {max(batches)}, the largest tried"
    return f"{name} pays at no batch tried" if stop == min(batches) else f"{name} stops paying at batch {stop}"


def grown_words(grown: dict[str, Any]) -> str:
    """What has to stand beside every figure of a model that was grown."""
    ties = f"; the others part from it at near-ties of the model, {grown['ties']} in all" if grown["ties"] else ""
    return (
        f"Grown r={grown['times']}: the model made {grown['times']} times as wide, {grown['parameters'] / 1e9:.2f} B "
        f"parameters, its function unchanged. Before timing it wrote {grown['prompts']} texts, {grown['tokens']} tokens; "
        f"{grown['identical']} of them are its original's to the last token{ties}."
    )


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
