"""Charts as SVG text: grouped bars (vertical or horizontal), lines, and stacked bars. No script, no library.

In: names and numbers. Out: an `<svg>` that scales with its container. Colours and fonts come from the page's style sheet,
whose classes `c0`, `c1`, ... are the contenders: a name has one colour everywhere. Marks show their number as a tooltip.
`standalone` makes a chart a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from foreword.drafters.spec import parse_spec

STYLE = Path(__file__).parent / "page.css"
WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 14, 46

Span = tuple[float, float]
Point = tuple[float, float]


def nice_step(most: float, count: int = 5) -> float:
    """Return a round number that divides 0..most into about `count` steps."""
    step = max(most, 1e-9) / count
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= step * 0.999)


def number(value: float) -> str:
    """Format a number briefly, never in scientific notation."""
    if value and abs(value) < 0.1:
        return f"{value:.3f}".rstrip("0")
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:.0f}"


class Frame:
    """A chart with a vertical axis from 0 to `most`."""

    def __init__(self, height: int, most: float, unit: str = "", label: str = "", below: int = BOTTOM) -> None:
        self.height, self.elements = height, list[str]()
        self.floor, self.step = height - below, nice_step(most)
        self.most = math.ceil(most / self.step - 1e-9) * self.step
        for place in range(round(self.most / self.step) + 1):
            value = place * self.step
            y = self.y(value)
            self.add(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 8, y + 4, f"{number(value)}{unit}", "end")
        if label:
            self.add(f'<text class="axis" transform="translate(12 {self.floor / 2:.0f}) rotate(-90)">{escape(label)}</text>')

    def y(self, value: float) -> float:
        return TOP + (self.floor - TOP) * (1 - value / self.most)

    def add(self, element: str) -> None:
        self.elements.append(element)

    def text(self, x: float, y: float, label: str, anchor: str = "middle", kind: str = "tick") -> None:
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>')

    def rule(self, value: float) -> None:
        """Draw a horizontal reference line."""
        y = self.y(value)
        self.add(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')

    def done(self, about: str) -> str:
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(about, quote=True)}">'
        return head + "".join(self.elements) + "</svg>"


def bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    about: str,
    unit: str = "",
    spans: Mapping[str, Sequence[Span | None]] | None = None,
    rule: float | None = None,
    colour: Callable[[str], int] = lambda _: 0,
) -> str:
    """Draw a vertical bar for each name in each group, with its span as a whisker; a dash where there is no number."""
    spans = spans or {}
    values = [value for row in series.values() for value in row if value is not None]
    tops = [span[1] for row in spans.values() for span in row if span]
    frame = Frame(300, max([*values, *tops, rule or 0.0, 0.1]) * 1.04, unit, below=30)
    room = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    wide = min(room * 0.82 / max(len(series), 1), 46)
    for place, group in enumerate(groups):
        middle = LEFT + room * (place + 0.5)
        frame.text(middle, frame.floor + 20, group.replace("_", " "), kind="label")
        for order, (name, row) in enumerate(series.items()):
            x = middle + (order - len(series) / 2) * wide
            span = spans[name][place] if name in spans else None
            _bar(frame, x, wide, row[place], span, f"{name}, {group}", unit, colour(name))
    if rule is not None:
        frame.rule(rule)
    return frame.done(about)


def _bar(
    frame: Frame, x: float, wide: float, value: float | None, span: Span | None, what: str, unit: str, colour: int
) -> None:
    middle = x + wide / 2
    if value is None:
        frame.text(middle, frame.floor - 4, "–")
        return
    title = f"{what}: {number(value)}{unit}" + (f" [{number(span[0])}, {number(span[1])}]" if span else "")
    y, gap = frame.y(value), min(wide * 0.12, 2)
    frame.add(
        f'<rect class="c{colour}" x="{x + gap:.1f}" y="{y:.1f}" width="{wide - 2 * gap:.1f}" '
        f'height="{max(frame.floor - y, 0.5):.1f}" rx="2"><title>{escape(title)}</title></rect>'
    )
    top = frame.y(span[1]) if span else y
    if span:
        low = frame.y(span[0])
        ends = "".join(f"M{middle - 3:.1f} {y:.1f}h6" for y in (low, top))
        frame.add(f'<path class="whisker" d="M{middle:.1f} {low:.1f}V{top:.1f}{ends}"/>')
    if wide >= 24:
        frame.text(middle, top - 5, number(value), kind="value")


def horizontal_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    about: str,
    unit: str = "",
    spans: Mapping[str, Sequence[Span | None]] | None = None,
    rule: float | None = None,
    colour: Callable[[str], int] = lambda _: 0,
) -> str:
    """Draw horizontal bars, for groups with long names: a bar for each name in each group, its span as a whisker."""
    spans, left, high, room = spans or {}, 136, 14, 14 * len(series) + 12
    numbers = [value for row in series.values() for value in row if value is not None]
    numbers += [span[1] for row in spans.values() for span in row if span]
    scale = (WIDTH - left - 60) / max([*numbers, rule or 0.0, 0.1])
    height, found = room * len(groups) + TOP, list[str]()
    for place, group in enumerate(groups):
        top = TOP + room * place
        found.append(
            f'<text class="label" x="{left - 10}" y="{top + room / 2:.1f}" text-anchor="end">{escape(group)}</text>'
        )
        for order, (name, row) in enumerate(series.items()):
            span = spans[name][place] if name in spans else None
            found += _horizontal_bar(
                left, top + order * high, scale, row[place], span, f"{name}, {group}", unit, colour(name)
            )
    if rule is not None:
        x = left + rule * scale
        found.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 8}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(about, quote=True)}">{"".join(found)}</svg>'


def _horizontal_bar(
    left: int, top: int, scale: float, value: float | None, span: Span | None, what: str, unit: str, colour: int
) -> list[str]:
    middle = top + 6
    if value is None:
        return [f'<text class="tick" x="{left + 6}" y="{middle + 4}">–</text>']
    title = f"{what}: {number(value)}{unit}" + (f" [{number(span[0])}, {number(span[1])}]" if span else "")
    found = [
        f'<rect class="c{colour}" x="{left}" y="{top}" width="{value * scale:.1f}" height="12" rx="2">'
        f"<title>{escape(title)}</title></rect>"
    ]
    if span:
        low, end = (left + bound * scale for bound in span)
        ends = "".join(f"M{x:.1f} {middle - 3}v6" for x in (low, end))
        found.append(f'<path class="whisker" d="M{low:.1f} {middle}H{end:.1f}{ends}"/>')
    x = left + max(value, span[1] if span else value) * scale + 6
    return [*found, f'<text class="value" x="{x:.1f}" y="{middle + 4}">{value:.2f}{unit}</text>']


def lines(
    series: Mapping[str, Sequence[Point]],
    about: str,
    across: str,
    upwards: str,
    unit: str = "",
    rule: float | None = None,
    doubling: bool = False,
    mark: tuple[float, str] | None = None,
    colour: Callable[[str], int] = lambda _: 0,
    dashed: Sequence[str] = (),
) -> str:
    """Draw a line for each name. `doubling`: the horizontal axis is logarithmic. `mark`: a position on it, and its label."""
    points = [point for row in series.values() for point in row]
    frame = Frame(300, max([y for _, y in points] + [rule or 0.0, 1e-9]) * 1.06, unit, upwards)
    ticks = sorted({x for x, _ in points})
    scale = (lambda x: math.log2(x)) if doubling else (lambda x: x)
    low, high = scale(ticks[0]), scale(ticks[-1])
    inset = 24

    def at(x: float) -> float:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return LEFT + inset + share * (WIDTH - LEFT - RIGHT - 2 * inset)

    for x in ticks:
        frame.text(at(x), frame.floor + 18, number(x))
    frame.text((LEFT + WIDTH - RIGHT) / 2, frame.floor + 38, across, kind="label")
    if rule is not None:
        frame.rule(rule)
    if mark is not None and ticks[0] <= mark[0] <= ticks[-1]:
        frame.add(f'<line class="mark" x1="{at(mark[0]):.1f}" x2="{at(mark[0]):.1f}" y1="{TOP}" y2="{frame.floor}"/>')
        frame.text(at(mark[0]) + 6, TOP + 12, mark[1], "start", "label")
    for name, row in series.items():
        style = f"c{colour(name)}{' dashed' if name in dashed else ''}"
        path = " ".join(f"{at(x):.1f},{frame.y(y):.1f}" for x, y in row)
        frame.add(f'<polyline class="line {style}" points="{path}"/>')
        frame.elements += [_dot(at(x), frame.y(y), style, f"{name}, {number(x)}: {number(y)}{unit}") for x, y in row]
    return frame.done(about)


def standalone(drawing: str, colours: Mapping[str, int], dashed: Sequence[str] = ()) -> str:
    """Make a chart a file of its own: with its style, a background, and a legend above it."""
    room = WIDTH / len(colours)
    marks = "".join(
        f'<path class="line c{colour}{" dashed" if name in dashed else ""}" d="M{place * room + 12:.1f} -16h28"/>'
        f'<text class="label" x="{place * room + 46:.1f}" y="-12">{escape(name)}</text>'
        for place, (name, colour) in enumerate(colours.items())
    )
    head, _, rest = drawing.partition(">")
    height = int(head.split('"')[1].split()[-1])
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"')
    head = head.replace(f'"0 0 {WIDTH} {height}"', f'"0 -34 {WIDTH} {height + 34}"')
    background = f'<rect x="0" y="-34" width="{WIDTH}" height="{height + 34}" fill="var(--card)"/>'
    return f"{head}><style>{STYLE.read_text(encoding='utf-8')}</style>{background}{marks}{rest}"


def _dot(x: float, y: float, style: str, title: str) -> str:
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{escape(title)}</title></circle>'


def stacked(rows: dict[str, dict[str, float]], about: str, unit: str) -> str:
    """Draw a horizontal bar for each name, stacked from its parts."""
    left, line = 176, 40
    height = line * len(rows) + 8
    most = max([sum(parts.values()) for parts in rows.values()] + [1e-9])
    wide = (WIDTH - left - 84) / most
    found = []
    for place, (name, parts) in enumerate(rows.items()):
        y, x = place * line + 8, float(left)
        found.append(f'<text class="label" x="{left - 10}" y="{y + 19}" text-anchor="end">{escape(short(name))}</text>')
        for order, (part, value) in enumerate(parts.items()):
            title = escape(f"{name}, {part}: {number(value)}{unit}")
            found.append(
                f'<rect class="p{order}" x="{x:.1f}" y="{y}" width="{max(value * wide - 1, 0.4):.1f}" height="26" rx="2">'
                f"<title>{title}</title></rect>"
            )
            x += value * wide
        total = number(sum(parts.values()))
        found.append(f'<text class="value" x="{x + 8:.1f}" y="{y + 18}" text-anchor="start">{total}{unit}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(about, quote=True)}">{"".join(found)}</svg>'


def short(name: str) -> str:
    """Shorten NAME=some/long/FOLDER to NAME=FOLDER, or to NAME if the folder has the same name; keep options; cut at 26."""
    method, folder, options = parse_spec(name)
    last = (folder or "").rstrip("/").rpartition("/")[2]
    name = f"{method}={last}" if last not in ("", method) else method
    name = ":".join([name, *(f"{key}={value}" for key, value in options.items())])
    return name if len(name) <= 26 else name[:25] + "…"
