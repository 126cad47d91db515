"""`foreword draw`: one round of a trace as a picture, an SVG file. A graph of guesses is drawn as it was drafted, with its
aliases; of a method without one, the tree.

Nodes stand from left to right by depth; leaves are laid below one another, and a node at the height of its first child.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.errors import InputError, StorageError

DRAW_EXAMPLES = """\
[bold]Examples[/]

  foreword generate "Why is the sky blue?" --method gsd --trace rounds.jsonl

  foreword draw rounds.jsonl --round 4 --out round.svg
"""

ACROSS, DOWN, WIDE, HIGH = 130, 30, 96, 22  # between nodes, and of one
STYLE = (
    "text{font:12px monospace;fill:#222}.small{font-size:10px;fill:#777}rect{fill:#fff;stroke:#bbb}"
    "rect.hit{fill:#d9f2e3;stroke:#2a8a57}path{fill:none;stroke:#bbb}path.hit{stroke:#2a8a57;stroke-width:2}"
    "path.alias{stroke-dasharray:4 3;stroke:#8a6fc2}path.alias.hit{stroke:#2a8a57}"
)


@dataclass(frozen=True)
class Edge:
    start: int
    goal: int
    chance: float | None = None
    alias: bool = False


@dataclass
class Picture:
    pieces: list[str]
    edges: list[Edge]
    walked: list[Edge] = field(default_factory=list)

    @staticmethod
    def of(line: dict[str, Any]) -> Picture:
        """Of a line of a trace."""
        drafted = line["nodes"]
        said = [drafted[row]["token"] for row in line["accepted"][1:]]
        if "graph" in line:
            nodes, edges = line["graph"]["nodes"], [Edge(**edge) for edge in line["graph"]["edges"]]
        else:
            nodes, edges = drafted, [Edge(node["parent"], number) for number, node in enumerate(drafted) if number]
        picture = Picture([node["piece"] for node in nodes], edges)
        at, tokens = 0, [node["token"] for node in nodes]
        for token in said:
            step = next(edge for edge in edges if edge.start == at and tokens[edge.goal] == token)
            picture.walked.append(step)
            at = step.goal
        return picture

    def places(self) -> list[tuple[int, int]]:
        """Column and row of every node."""
        below: list[list[int]] = [[] for _ in self.pieces]
        for edge in self.edges:
            if not edge.alias:
                below[edge.start].append(edge.goal)
        found, waiting, row = [(0, 0)] * len(self.pieces), [(0, 0, True)], -1
        while waiting:
            node, column, first = waiting.pop()
            row += not first or row < 0
            found[node] = (column, row)
            children = [(child, column + 1, place == 0) for place, child in enumerate(below[node])]
            waiting += reversed(children)
        return found

    def svg(self, title: str) -> str:
        places = [(20 + ACROSS * column, 40 + DOWN * row) for column, row in self.places()]
        width, height = (max(axis) + more for axis, more in zip(zip(*places, strict=True), (ACROSS, DOWN), strict=True))
        lines = [_curve(edge, places, edge in self.walked) for edge in self.edges]
        hit = {0, *(edge.goal for edge in self.walked)}
        boxes = [
            _box(piece, place, number in hit) for number, (piece, place) in enumerate(zip(self.pieces, places, strict=True))
        ]
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><style>{STYLE}</style>'
        return "\n".join([head, f'<text x="20" y="20">{escape(title)}</text>', *lines, *boxes, "</svg>"]) + "\n"


def _curve(edge: Edge, places: list[tuple[int, int]], hit: bool) -> str:
    (x, y), (to_x, to_y) = places[edge.start], places[edge.goal]
    x, y, to_y = x + WIDE, y + HIGH // 2, to_y + HIGH // 2
    kind = " ".join(name for name, holds in (("alias", edge.alias), ("hit", hit)) if holds)
    bent = f"M{x} {y}C{x + 24} {y} {to_x - 24} {to_y} {to_x} {to_y}"
    label = ""
    if edge.chance is not None and not edge.alias:
        label = f'<text class="small" x="{to_x - 30}" y="{to_y - 4}">{100 * edge.chance:.0f}%</text>'
    return f'<path class="{kind}" d="{bent}"/>{label}'


def _box(piece: str, place: tuple[int, int], hit: bool) -> str:
    (x, y), shown = place, repr(piece)[1:-1]
    shown = shown if len(shown) <= 12 else shown[:11] + "…"
    kind = ' class="hit"' if hit else ""
    box = f'<rect{kind} x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5"/>'
    return f'{box}<text x="{x + 6}" y="{y + 15}">{escape(shown)}</text>'


def draw(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="What `foreword generate --trace FILE` wrote.")],
    round: Annotated[int, typer.Option(min=0, metavar="N", help="Which round of the text, from 0 on.")] = 0,
    text: Annotated[int, typer.Option(min=0, metavar="N", help="Which text, where several were written.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the picture goes. Default: standard output.")
    ] = None,
) -> None:
    """Draw one round of a trace as an SVG picture.

    What was accepted is green. Of gsd it shows the graph that was drafted: a dashed line is an alias, a continuation that
    came back and was not drafted again; figures are how likely a guess was to the small model.
    """
    line = _line(trace, text, round)
    title = f"text {text}, round {round}: {len(line['nodes'])} rows checked, {len(line['accepted'])} tokens decided"
    drawn = Picture.of(line).svg(title)
    if out is None:
        typer.echo(drawn, nl=False)
        return
    try:
        out.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error}); name another file") from error


def _line(trace: Path, text: int, round: int) -> dict[str, Any]:
    try:
        lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        found = {(line["text"], line["round"]): line for line in lines}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{trace} is no trace ({error!r}); `foreword generate --trace FILE` writes one") from error
    if (text, round) not in found:
        most = max((number for of, number in found if of == text), default=None)
        there = f"it has {len({of for of, _ in found})} texts" if most is None else f"that text has rounds 0 to {most}"
        raise InputError(f"{trace} has no round {round} of text {text}; {there}")
    return found[text, round]
