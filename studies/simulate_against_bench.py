"""The simulator against benchmarks of larger batches: `python studies/simulate_against_bench.py --out FOLDER`.

`foreword bench` times blocks of prompts at batch sizes 8 and 32. Here the same prompts arrive at once at a simulated replica
with as many slots. Costs are those that `foreword simulate` takes from the results. The lengths of outputs are those of the
runs at batch size 1. Results do not have the lengths of prompts: they are taken from the time to the first token of `plain`
on the large model, where reading the prompt is most of it. Made results/simulate_cuda/results.json.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from foreword.bench.report import read_results
from foreword.simulate.arrivals import Arrival
from foreword.simulate.bench_costs import costs_of_results
from foreword.simulate.costs import ServingCosts
from foreword.simulate.fleet import Fleet
from foreword.simulate.sizing import Load
from study import ROOT, write

RESULTS = ROOT / "results"
LARGE = ("bench_cuda_7b", "bench_cuda_7b_batches")
PAIRS = (LARGE, ("bench_cuda_48", "bench_cuda_batches"))  # at batch size 1, and at larger ones
LONGEST = 4096  # rows of a prompt

Turn = tuple[str, int]  # the id of a prompt, and which of its turns


def timings(name: str, method: str) -> list[dict[str, Any]]:
    """Return the first run of a method's blocks, greedy."""
    found = read_results(RESULTS / name)["timings"]
    first = [one for one in found if not one.get("temperature") and not one.get("repeat")]
    return [one for one in first if one["contender"] == method]


def prompt_rows() -> dict[Turn, int]:
    """Return how long prompts are, by the time that the large model takes to read them."""
    plain = costs_of_results([RESULTS / name for name in LARGE]).of("plain")
    seconds = [plain.prompts.at(rows) for rows in range(1, LONGEST)]
    return {
        (one["prompt"], one.get("turn", 0)): 1 + int(np.searchsorted(seconds, one["first_s"] - plain.rounds[0].seconds))
        for one in timings(LARGE[0], "plain")
    }


def replayed(costs: ServingCosts, alone: str, batches: str, method: str, rows: dict[Turn, int]) -> list[dict[str, Any]]:
    """Return tokens per second of a method at each larger batch size, simulated and measured."""
    outputs = {(one["prompt"], one.get("turn", 0)): one["tokens"] for one in timings(alone, method)}
    blocks, found = timings(batches, method), []
    for batch in sorted({one["batch"] for one in blocks}):
        tokens = seconds = measured_tokens = measured_seconds = 0.0
        for block in (one for one in blocks if one["batch"] == batch):
            turns = [(prompt, block.get("turn", 0)) for prompt in block["prompt"].split()]
            load = Load([Arrival(0.0, rows[turn] + 1, outputs[turn]) for turn in turns], costs.scheduling)
            one = load.served_by(costs.of(method), None, Fleet(slots=batch))
            tokens, seconds = tokens + one.tokens, seconds + one.seconds
            measured_tokens, measured_seconds = measured_tokens + block["tokens"], measured_seconds + block["seconds"]
        speeds = {"simulated": tokens / seconds, "measured": measured_tokens / measured_seconds}
        found.append({"model": costs.model, "method": method, "batch": batch, **speeds})
    return found


def report(about: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Return the report as a page."""
    lines = [
        f"| {one['model']} | {one['batch']} | `{one['method']}` | {one['simulated']:,.0f} | {one['measured']:,.0f} | "
        f"{one['simulated'] / one['measured'] - 1:+.0%} |"
        for one in found
    ]
    table = "\n".join(lines)
    return f"""# `foreword simulate` against benchmarks of larger batches

{about["costs_of"]}, {about["date"]}, commit {about["commit"]}. Tokens per second of blocks of prompts that arrive at once.
A round at batch 1 was timed. Rounds of larger batches are passes of the cost curve, plus drafting.

| model | batch | method | simulated | measured | difference |
|---|---|---|---|---|---|
{table}

Made by `{about["command"]}`.
"""


def simulate_against_bench(
    out: Annotated[Path, typer.Option(help="Write results.json and report.md into this folder.")],
) -> None:
    """Simulate the blocks of published benchmarks."""
    rows, found = prompt_rows(), []
    for alone, batches in PAIRS:
        costs = costs_of_results([RESULTS / alone, RESULTS / batches])
        for method in costs.methods:
            found += replayed(costs, alone, batches, method, rows)
    about = write(out / "results.json", "replayed", found, torch.device("cpu"), costs_of=costs.machine)
    (out / "report.md").write_text(report(about, found), encoding="utf-8")
    for one in found:
        print(f"{one['model']}, {one['method']}, batch {one['batch']}: {one['simulated'] / one['measured'] - 1:+.1%}")
    print(f"median of the differences: {median(abs(one['simulated'] / one['measured'] - 1) for one in found):.1%}")


if __name__ == "__main__":
    typer.run(simulate_against_bench)
