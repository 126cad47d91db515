"""Print the tables of docs/methods/self_speculative.md: `python studies/break_even.py`.

In: measured times of passes by their rows, on three machines and models, and the record of `foreword search` for the default
model. Out: how often a shortened model must predict the whole model's token so that drafting with it is as fast as plain
decoding; and how often the default model does. A test compares the page with what this prints.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from foreword.drafting.self_drafting import VerifyCost, best_length, break_even
from foreword.model.cost import CostCurve

RESULTS = Path(__file__).parents[1] / "results"
SEARCH = "skip_search_cpu/record.json"
DRAFT_COSTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
AGREEMENTS = (0.8, 0.9, 0.95)
LARGE = "7B shapes, H200"
MOST = 12  # draft tokens
SHOWN = (1, 2, 4, 8, 12)  # half-layers


def read(name: str) -> Any:
    raw = (RESULTS / name).read_bytes()
    return json.loads(lzma.decompress(raw) if name.endswith(".xz") else raw)


def curves() -> dict[str, VerifyCost]:
    """Return what passes cost by their rows; one row costs 1."""
    xeon, small = read("rows_cpu.json"), read("profile_cuda/inside.json.xz")["about"]["milliseconds"]
    large = {one["rows"]: one["ms"] for one in read("profile_cuda/7b.json")["sections"]["passes"]}
    times = {
        "default model, two cores": dict(zip(xeon["rows"], xeon["milliseconds"]["ours"], strict=True)),
        "default model, H200": {int(rows): ms for rows, ms in small.items()},
        LARGE: large,
    }
    found = {name: CostCurve(tuple(sorted(one)), tuple(one[rows] for rows in sorted(one))) for name, one in times.items()}
    return {name: curve.relative for name, curve in found.items()}


def needed() -> list[list[str]]:
    """Return, by what a draft token costs, the break-even agreement for each curve, and the speed-ups of the last one."""
    known, rows = curves(), []
    for cost in DRAFT_COSTS:
        shares = [_share(break_even(cost, curve, MOST)) for curve in known.values()]
        speeds = [best_length(agreement, cost, known[LARGE], MOST, least=1).speedup for agreement in AGREEMENTS]
        rows.append([f"{cost:.1f}", *shares, *(f"{speed:.2f}x" for speed in speeds)])
    return rows


def found() -> list[list[str]]:
    """Return how often the shortened default model was right, and what drafting with it is expected to bring."""
    rows = []
    for step in read(SEARCH)["steps"]:
        count = len(step["attention"]) + len(step["mlp"])
        if count in SHOWN:
            halves = f"{len(step['attention'])} attention, {len(step['mlp'])} MLP"
            curve, cost = curves()["default model, H200"], step["weights_read"]
            best = best_length(step["agreement"], cost, curve, MOST, least=1)
            right, least = f"{step['agreement']:.2f}", _share(break_even(cost, curve, MOST))
            rows.append([halves, f"{cost:.2f}", right, least, f"{best.speedup:.2f}x"])
    return rows


def _share(agreement: float | None) -> str:
    return "never" if agreement is None else f"{agreement:.2f}"


if __name__ == "__main__":
    for table in (needed(), found()):
        print("\n".join(f"| {' | '.join(cells)} |" for cells in table), end="\n\n")
