"""A sweep's figures as one picture: accuracy by layer, nearness by depth, and step 2 with and without sight of step 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HOW = "pip install 'foreword[train]', which brings matplotlib, and the sweep is drawn too"


def draw(record: dict[str, Any], file: Path) -> bool:
    """Whether it was drawn: not where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an extra
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    accuracy, nearness, sight = figure.subplots(1, 3)
    for step, by_layer in record["accuracy"].items():
        for kind, style in (("top1", "-o"), ("top5", "--o")):
            _line(accuracy, by_layer, kind, style, f"step {step}, {kind}", f"C{int(step) - 1}")
    accuracy.set(title="Accuracy of each step by the layer it joins after", ylabel="share right")
    for step, by_layer in record["cosine"].items():
        nearness.plot([int(layer) for layer in by_layer], list(by_layer.values()), "-o", ms=3, label=f"step {step}")
    nearness.set(title="Pseudo and real rows, by depth", ylabel="cosine")
    blind = record["step 2 without sight of step 1"]
    if blind:
        for kind, style in (("top1", "-o"), ("top5", "--o")):
            _line(sight, record["accuracy"][2], kind, style, f"sees step 1, {kind}", "C0")
            _line(sight, blind, kind, style, f"does not, {kind}", "C1")
    sight.set(title="Step 2 with and without sight of step 1", ylabel="share right")
    for part in (accuracy, nearness, sight):
        part.set_xlabel("layer")
        part.grid(alpha=0.3)
        if part.has_data():
            part.legend(fontsize="small")
    figure.suptitle(f"{record['model']}: pseudo rows")
    figure.savefig(file, dpi=120)
    return True


def _line(part: Any, by_layer: dict[int, dict[str, float]], kind: str, style: str, label: str, colour: str) -> None:
    values = [figures[kind] for figures in by_layer.values()]
    part.plot([int(layer) for layer in by_layer], values, style, color=colour, ms=4, label=label)
