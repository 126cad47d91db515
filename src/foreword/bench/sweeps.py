"""Charts of `foreword train --sweep`: accuracy by layer, cosine similarity by depth, and step 2 with and without seeing
step 1. The command writes them next to its JSON; `python -m foreword.bench.sweeps FILE --out DIR` draws them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.bench.svg import Point, lines, standalone
from foreword.files import read_json

KINDS = {"top1": "top-1", "top5": "top-5"}
ByLayer = Mapping[str, Mapping[str, float]]


def sweeps(
    file: Annotated[Path, typer.Argument(help="A sweep.json.")],
    out: Annotated[Path, typer.Option(help="The folder for the charts.")],
) -> None:
    """Draw a sweep."""
    draw(read_json(file), out)


def draw(record: dict[str, Any], folder: Path) -> None:
    """Write accuracy.svg, nearness.svg and, if there is a step 2, sight.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings(record).items():
        (folder / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")


def drawings(record: dict[str, Any]) -> dict[str, str]:
    accuracy: Mapping[str, ByLayer] = {f"step {step}": by_layer for step, by_layer in record["accuracy"].items()}
    nearness = {f"step {step}": by_layer for step, by_layer in record["cosine"].items()}
    found = {"accuracy": _accuracies(accuracy, "accuracy of each step by the layer after which it joins")}
    near = {name: [(float(layer), value) for layer, value in by_layer.items()] for name, by_layer in nearness.items()}
    colours = {name: number for number, name in enumerate(near, start=1)}
    drawing = lines(near, "pseudo and real rows, by depth", "layer", "cosine", colour=colours.__getitem__)
    found["nearness"] = standalone(drawing, colours)
    if blind := record["step 2 without sight of step 1"]:
        both = {"sees step 1": accuracy["step 2"], "does not see step 1": blind}
        found["sight"] = _accuracies(both, "step 2 with and without seeing step 1")
    return found


def _accuracies(series: Mapping[str, ByLayer], about: str) -> str:
    """Draw top-1 as lines and top-5 dashed, in percent."""
    points: dict[str, list[Point]] = {}
    colours: dict[str, int] = {}
    for number, (name, by_layer) in enumerate(series.items(), start=1):
        for kind, called in KINDS.items():
            points[f"{name}, {called}"] = [(float(layer), 100 * figures[kind]) for layer, figures in by_layer.items()]
            colours[f"{name}, {called}"] = number
    dashed = [name for name in points if name.endswith(KINDS["top5"])]
    drawing = lines(points, about, "layer", "right", "%", colour=colours.__getitem__, dashed=dashed)
    return standalone(drawing, colours, dashed)


if __name__ == "__main__":
    typer.run(sweeps)
