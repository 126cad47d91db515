"""The SVG of `foreword draw`: draft tokens, those that the model checked and accepted, and the token it chose itself.

In: a line of a trace. Out: an SVG file without scripts, in the light or dark colours of the program that shows it. Nodes are
placed from left to right by depth. Leaves are placed below one another, and a node at the height of its first child. The
font is monospaced, so the width of text is known.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

MARGIN, GAP, DOWN, HIGH = 20, 36, 30, 22  # px: around the picture; between columns; from row to row; height of a box
SMALL, NORMAL = 10, 12  # font sizes
ADVANCE = 0.62  # a monospaced character is at most this wide, as a share of its font size
LONGEST = 12  # characters of a token that fit into a box
LEAST_WIDTH = 440
SPACE = "␣"  # makes spaces visible
LINE = 18  # of the title and of the legend

ROOT, ACCEPTED, CHECKED, UNCHECKED, CHOSEN = "root", "hit", "checked", "unchecked", "chosen"
LEGEND = {
    ROOT: "decided before",
    ACCEPTED: "accepted",
    CHOSEN: "the model's own token",
    CHECKED: "checked, not accepted",
    UNCHECKED: "drafted, not checked",
}
ALIAS_LEGEND = "alias: drafted once, shared"
PAINTED_FIRST = (UNCHECKED, CHECKED, ROOT, ACCEPTED, CHOSEN)  # the most important on top


@dataclass(frozen=True)
class Palette:
    """`fill`, `stroke` and `text` by kind of node. Edges have the stroke of the node they lead to."""

    ground: str
    ink: str
    alias: str
    fill: dict[str, str]
    stroke: dict[str, str]
    text: dict[str, str]


LIGHT = Palette(
    ground="#ffffff",
    ink="#1f2328",
    alias="#8250df",
    fill={ROOT: "#e7ebef", ACCEPTED: "#d3f3df", CHECKED: "#ffffff", UNCHECKED: "#ffffff", CHOSEN: "#dbeafe"},
    stroke={ROOT: "#1f2328", ACCEPTED: "#1a7f37", CHECKED: "#59636e", UNCHECKED: "#818b98", CHOSEN: "#0b5cc4"},
    text={ROOT: "#1f2328", ACCEPTED: "#1f2328", CHECKED: "#1f2328", UNCHECKED: "#59636e", CHOSEN: "#1f2328"},
)
DARK = Palette(
    ground="#0d1117",
    ink="#e6edf3",
    alias="#bc8cff",
    fill={ROOT: "#2a313c", ACCEPTED: "#12361f", CHECKED: "#0d1117", UNCHECKED: "#0d1117", CHOSEN: "#0c2d6b"},
    stroke={ROOT: "#e6edf3", ACCEPTED: "#3fb950", CHECKED: "#9198a1", UNCHECKED: "#6e7681", CHOSEN: "#58a6ff"},
    text={ROOT: "#e6edf3", ACCEPTED: "#e6edf3", CHECKED: "#e6edf3", UNCHECKED: "#9198a1", CHOSEN: "#e6edf3"},
)

SHAPES = (
    f"text{{font:{NORMAL}px monospace}}.small{{font-size:{SMALL}px}}path{{fill:none}}.end{{text-anchor:end}}"
    f".{ACCEPTED},.{CHOSEN},.{ROOT}{{stroke-width:2}}"
    f".{UNCHECKED}{{stroke-dasharray:2 3}}.alias{{stroke-dasharray:7 3}}.alias.{UNCHECKED}{{stroke-dasharray:1 4}}"
)


def style() -> str:
    return f"{SHAPES}{_colours(LIGHT)}@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"


def _colours(palette: Palette) -> str:
    rules = [f".ground{{fill:{palette.ground}}}text{{fill:{palette.ink}}}"]
    for kind in LEGEND:
        rules.append(f"rect.{kind}{{fill:{palette.fill[kind]}}}rect.{kind},path.{kind}{{stroke:{palette.stroke[kind]}}}")
        rules.append(f"text.{kind}{{fill:{palette.text[kind]}}}")
    rules += [f"path.alias.{kind}{{stroke:{palette.alias}}}" for kind in (CHECKED, UNCHECKED)]
    return "".join(rules)


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Node:
    piece: str
    kind: str = UNCHECKED


@dataclass(frozen=True)
class Edge:
    start: int
    goal: int
    chance: float | None = None
    alias: bool = False
    kind: str = UNCHECKED


@dataclass(frozen=True)
class Picture:
    nodes: list[Node]
    edges: list[Edge]

    @staticmethod
    def of(line: dict[str, Any]) -> Picture:
        """Make the picture of a line of a trace: the draft graph, or the tree if there is none."""
        rows, accepted = line["nodes"], line["accepted"]
        if "graph" in line:
            found, edges = line["graph"]["nodes"], [Edge(**edge) for edge in line["graph"]["edges"]]
            taken = _unrolled(rows, [node["token"] for node in found], edges)
        else:
            found, edges = rows, [Edge(row["parent"], number) for number, row in enumerate(rows) if number]
            taken = list(range(len(edges)))
        kinds = dict.fromkeys(taken, CHECKED) | {taken[row - 1]: ACCEPTED for row in accepted[1:]}
        edges = [replace(edge, kind=kinds.get(number, UNCHECKED)) for number, edge in enumerate(edges)]
        steps = sorted(kinds, key=lambda step: PAINTED_FIRST.index(kinds[step]))  # the last of several edges to a node wins
        reached = {0: ROOT} | {edges[step].goal: kinds[step] for step in steps}
        nodes = [Node(node["piece"], reached.get(number, UNCHECKED)) for number, node in enumerate(found)]
        last = edges[taken[accepted[-1] - 1]].goal if accepted[-1] else 0
        return Picture(nodes, edges)._with_chosen(line, taken, last)

    def _with_chosen(self, line: dict[str, Any], taken: list[int], last: int) -> Picture:
        """Add the model's own token after node `last`. If the sequence ends with a right candidate, that one is marked."""
        chosen, after = line.get("next_token"), line["accepted"][-1]
        for row, node in enumerate(line["nodes"]):
            if row and node["parent"] == after and node["token"] == chosen:
                edges, nodes, step = list(self.edges), list(self.nodes), taken[row - 1]
                edges[step] = replace(edges[step], kind=CHOSEN)
                nodes[edges[step].goal] = replace(nodes[edges[step].goal], kind=CHOSEN)
                return Picture(nodes, edges)
        edge = Edge(last, len(self.nodes), kind=CHOSEN)
        return Picture([*self.nodes, Node(line["next"], CHOSEN)], [*self.edges, edge])

    def svg(self, title: str) -> str:
        wide = _box_width(any(edge.chance is not None for edge in self.edges))
        cells = self.cells()
        width = max(LEAST_WIDTH, 2 * MARGIN + max(column for column, _ in cells) * (wide + GAP) + wide)
        lines = textwrap.wrap(title, int((width - 2 * MARGIN) / (ADVANCE * NORMAL)))
        head = [_text(MARGIN, MARGIN + LINE * number, text) for number, text in enumerate(lines)]
        legend, top = self._legend(width, MARGIN + LINE * len(lines))
        places = [Point(MARGIN + (wide + GAP) * column, top + DOWN * row) for column, row in cells]
        height = max(place.y for place in places) + HIGH + MARGIN
        order = sorted(self.edges, key=lambda edge: PAINTED_FIRST.index(edge.kind))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
                f'role="img" aria-label="{escape(title, quote=True)}"><style>{style()}</style>',
                f'<g><rect class="ground" width="{width}" height="{height}"/></g>',
                *head,
                legend,
                *(_curve(edge, places, wide) for edge in order),
                *(_box(node, place, wide) for node, place in zip(self.nodes, places, strict=True)),
                *self._chances(places, wide),
                "</svg>\n",
            ]
        )

    def cells(self) -> list[tuple[int, int]]:
        """Return column and row of every node. The model's own token comes first after its node, then the candidates."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for edge in sorted(self.edges, key=lambda edge: edge.kind != CHOSEN):
            if not edge.alias:
                children[edge.start].append(edge.goal)
        found, waiting, row = [(0, 0)] * len(self.nodes), [(0, 0, True)], -1
        while waiting:
            node, column, first = waiting.pop()
            row += not first or row < 0
            found[node] = (column, row)
            below = [(child, column + 1, place == 0) for place, child in enumerate(children[node])]
            waiting += reversed(below)
        return found

    def _legend(self, width: int, top: int) -> tuple[str, int]:
        """Return the legend of all styles that occur, in as many lines as needed, and the y of the next line."""
        kinds = {node.kind for node in self.nodes} | {edge.kind for edge in self.edges}
        entries = [(kind, text) for kind, text in LEGEND.items() if kind in kinds]
        entries += [("alias", ALIAS_LEGEND)] if any(edge.alias for edge in self.edges) else []
        x, y, shapes = MARGIN, top, list[str]()
        for kind, text in entries:
            room = 30 + round(ADVANCE * SMALL * len(text)) + 14
            if x > MARGIN and x + room > width - MARGIN:
                x, y = MARGIN, y + LINE
            shapes.append(_sample(kind, x, y) + _text(x + 30, y + 4, text, "small"))
            x += room
        return f'<g class="legend">{"".join(shapes)}</g>', y + LINE + 6

    def _chances(self, places: list[Point], wide: int) -> Iterator[str]:
        """Yield the probability of each candidate, at the right end of its box."""
        for edge in self.edges:
            if edge.chance is not None and not edge.alias:
                place, kind = places[edge.goal], self.nodes[edge.goal].kind
                yield _text(place.x + wide - 6, place.y + 15, f"{100 * edge.chance:.0f}%", f"small end {kind}")


def _unrolled(rows: list[dict[str, Any]], tokens: list[int], edges: list[Edge]) -> list[int]:
    """Return the edge of every row after the root. A graph is unrolled for the model, so rows may share an edge."""
    steps = {(edge.start, tokens[edge.goal]): number for number, edge in reversed(list(enumerate(edges)))}
    at, taken = [0], list[int]()
    for row in rows[1:]:
        taken.append(steps[at[row["parent"]], row["token"]])
        at.append(edges[taken[-1]].goal)
    return taken


def _box_width(chances: bool) -> int:
    percent = ADVANCE * SMALL * len("100%") + 6 if chances else 0
    return round(6 + ADVANCE * NORMAL * LONGEST + 6 + percent)


def _curve(edge: Edge, places: list[Point], wide: int) -> str:
    start, goal = places[edge.start], places[edge.goal]
    x, y, to_y = start.x + wide, start.y + HIGH // 2, goal.y + HIGH // 2
    bent = f"M{x} {y}C{x + 24} {y} {goal.x - 24} {to_y} {goal.x} {to_y}"
    return f'<path class="{"alias " if edge.alias else ""}{edge.kind}" d="{bent}"/>'


def _box(node: Node, place: Point, wide: int) -> str:
    text = repr(node.piece)[1:-1].replace(" ", SPACE)
    box = (
        f'<rect class="{node.kind}" x="{place.x}" y="{place.y}" width="{wide}" height="{HIGH}" rx="{_round(node.kind)}">'
        f"<title>{escape(text)}: {LEGEND[node.kind]}</title></rect>"
    )
    return box + _text(place.x + 6, place.y + 15, _shortened(text), node.kind)


def _round(kind: str) -> int:
    return HIGH // 2 if kind == CHOSEN else 5


def _sample(kind: str, x: int, y: int) -> str:
    if kind == "alias":
        return f'<path class="alias {CHECKED}" d="M{x} {y}h24"/>'
    return f'<rect class="{kind}" x="{x}" y="{y - 6}" width="24" height="12" rx="{min(_round(kind), 6)}"/>'


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def _shortened(text: str) -> str:
    """Cut text to the width of a box. East Asian characters and emoji count double."""
    widths = [2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text]
    if sum(widths) <= LONGEST:
        return text
    held, room = "", LONGEST - 1
    for character, width in zip(text, widths, strict=True):
        room -= width
        if room < 0:
            break
        held += character
    return held + "…"
