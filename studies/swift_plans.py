"""Measure how often the target is right without every second inner layer: `python studies/swift_plans.py --help`.

In: data of `foreword distill`. Out: the agreement of the plan that `swift` starts with, for several ratios of half-layers.
Made results/swift_plans_cpu.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.api import load
from foreword.methods.swift import PlanSearch
from foreword.model.fingerprint import Fingerprint
from foreword.train import all_sequences, open_data
from foreword.train.skip_search import SearchSettings, agreement_on, windows_of
from study import keep

RATIOS = "0.05,0.1,0.2,0.3,0.45"


def swift_plans(
    data: Annotated[list[Path], typer.Option(help="A folder of `foreword distill`; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Parts of sequences that are read.")] = 64,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a part.")] = 12,
    ratios: Annotated[str, typer.Option(help="Shares of the inner half-layers that are left out.")] = RATIOS,
) -> None:
    """Measure the agreement of swift's first plans."""
    with load(model, "plain", slots=1, device=device, threads=threads) as llm:
        sequences = all_sequences(open_data(data, Fingerprint.of(llm.model)))
        found = []
        with agreement_on(llm.model, windows_of(sequences, SearchSettings(windows, length))) as agreement:
            for ratio in map(float, ratios.split(",")):
                plan = PlanSearch(llm.model.layers, ratio, llm.model.name).plan
                found.append({"ratio": ratio, "half_layers": len(plan.halves), "agreement": round(agreement(plan), 4)})
                print(f"ratio {ratio}: {len(plan.halves)} half-layers left out, agreement {found[-1]['agreement']:.3f}")
        keep(out, "plans", llm.model, found, windows=windows, length=length)


if __name__ == "__main__":
    typer.run(swift_plans)
