"""Draw docs/pictures/speedups.svg, the chart of the README: `python studies/speedup_chart.py`.

In: two results of `foreword bench` over 48 prompts that nothing was tuned on, one request at a time. Out: a bar for each
method and machine, with its 95% interval; 1.00x is plain decoding on the same engine. A test compares the file with what
this draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreword.bench.report import read_results
from foreword.bench.svg import horizontal_bars, standalone
from foreword.methods import METHODS

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "speedups.svg"
GPU, CPU = "one NVIDIA H200, bfloat16", "two cores of an AMD EPYC, float32"
SOURCES = {GPU: "results/bench_cuda_48b", CPU: "results/bench_cpu_48b"}
COLOURS = {GPU: 1, CPU: 2}

Rows = dict[str, dict[str, Any]]


def rows(folder: str) -> Rows:
    """Return the rows over all prompts by method. Other decoders are not shown: their rounds are not ours."""
    found = read_results(ROOT / folder)["tables"]["overall"]
    return {row["contender"]: row for row in found if row["contender"] in METHODS and row["contender"] != "plain"}


def chart() -> str:
    machines = {machine: rows(folder) for machine, folder in SOURCES.items()}
    first, *_ = machines.values()
    methods = sorted({name for found in machines.values() for name in found}, key=lambda name: -_speed(first, name))
    drawing = horizontal_bars(
        methods,
        {
            machine: [found[name]["speedup"] if name in found else None for name in methods]
            for machine, found in machines.items()
        },
        "Speed-up of each method over plain decoding on the same engine, on a GPU and on a CPU",
        "x",
        {machine: [_span(found.get(name)) for name in methods] for machine, found in machines.items()},
        rule=1.0,
        colour=COLOURS.__getitem__,
    )
    return standalone(drawing, COLOURS) + "\n"


def _speed(found: Rows, name: str) -> float:
    return found[name]["speedup"] if name in found else 0.0


def _span(row: dict[str, Any] | None) -> tuple[float, float] | None:
    return (row["low"], row["high"]) if row and row["low"] is not None else None


if __name__ == "__main__":
    PICTURE.write_text(chart(), encoding="utf-8")
