"""Time a pass by its number of rows, with the stock layers and with ours: `python studies/row_cost.py --help`.

Both run in turns in one process, on the same threads. Each figure is the fastest of several passes at 256 cached tokens.
Made results/rows_cpu.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from foreword.bench.report import facts
from foreword.hub.resolve import resolve
from foreword.model.cost import ROWS, measure
from foreword.model.loading import choose_device, choose_dtype, load_stock, load_weights
from foreword.model.model import Model
from study import command


def row_cost(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    model: Annotated[str | None, typer.Option(help="A model folder, file or id.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Time passes by rows, with the layers of transformers and with the fused layers of Foreword."""
    if threads:
        torch.set_num_threads(threads)
    place, folder = choose_device(device), resolve(model)
    precision = choose_dtype(dtype, place)
    kinds = {"stock": Model(load_stock(folder, place, precision)), "ours": Model(load_weights(folder, place, precision))}
    tries = {kind: [measure(one).curve() for _ in range(2)] for kind, one in kinds.items()}
    best = {kind: [min(one.at(count) for one in curves) * 1e3 for count in ROWS] for kind, curves in tries.items()}
    print("rows   stock ms   ours ms")
    for count, stock, ours in zip(ROWS, best["stock"], best["ours"], strict=True):
        print(f"{count:4d} {stock:10.1f} {ours:9.1f}")
    out.parent.mkdir(parents=True, exist_ok=True)
    about = facts(place, model=folder.name, dtype=str(precision).removeprefix("torch."))
    about["command"] = command()
    out.write_text(json.dumps({"about": about, "rows": list(ROWS), "milliseconds": best}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(row_cost)
