"""`report.html`: the report as one page that needs nothing else, with drawings that a person wants to look at.

In: the dictionary of `report.content`, or a results.json of an earlier version. Out: HTML with its style and its SVG inside.
A drawing whose figures were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from foreword.bench.markdown import (
    ECONOMY_HEADS,
    HEADS,
    cells,
    economy_cells,
    heat_words,
    pass_words,
    side_by_side,
    speedup_words,
    stop_words,
    trouble_words,
    where_words,
    widened_words,
)
from foreword.bench.svg import STYLE, bars, lines, short, stacked

Content = dict[str, Any]
COLOURS = 14  # in the style sheet
PART_COLOURS = (2, 1, 3, 0)  # of the parts of a round, as in the style sheet


class HtmlReport:
    """Everything about one report. The base is grey; the others have their colours by their order."""

    def __init__(self, found: Content) -> None:
        self.found, self.base = found, found["base"]
        batch, tables = next(iter(found["batches"]), 1), [*found["tables"].values()]
        first: list[Content] = tables[0] if tables else found["batches"][batch]
        self.beside = "" if int(batch) == 1 else f" with {batch} texts side by side"
        names = [row["contender"] for row in first]
        others = [name for name in names if name != self.base]
        self.colours = {self.base: 0} | {name: 1 + place % (COLOURS - 1) for place, name in enumerate(others)}
        self.overall, self.names, self.others = first, names, others

    def colour(self, name: str) -> int:
        return self.colours.get(name, 0)

    def html(self) -> str:
        sections = [
            *(self.head(), self.cards(), self.speedups(), self.rounds(), self.depths(), self.batches(), self.split()),
            *(self.cost(), self.economy(), self.tables(), self.troubles(), self.origin()),
        ]
        style = STYLE.read_text(encoding="utf-8")
        title = escape(f"Benchmark: {self.found['about'].get('model') or 'Foreword'}")
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
            f"<body><main>{''.join(sections)}</main></body></html>\n"
        )

    # The top

    def head(self) -> str:
        about = self.found["about"]
        grown = f"<p>{escape(widened_words(about['grown']))}</p>" if "grown" in about else ""
        first, *others = heat_words(self.found)
        drawn = f" The drawings are of {first} texts." if others else ""
        name, words = escape(about.get("model") or "Benchmark"), escape(where_words(self.found) + drawn)
        return f'<h1>{name}</h1><p class="soft">{words}</p>{grown}'

    def cards(self) -> str:
        told = [row for row in self.overall if _told(row) is not None and row["contender"] != self.base]
        best = max(told, key=lambda row: row["speedup"], default=None)
        plain = next(row for row in self.overall if row["contender"] == self.base)
        cards = []
        if best is not None:
            cards.append(
                (
                    speedup_words(best).partition(" [")[0],
                    f"the fastest, {short(best['contender'])}, over {self.base}{self.beside}",
                )
            )
            cards.append(
                (
                    f"{best['tokens_per_second']:.1f}",
                    f"its tokens a second; {self.base} has {plain['tokens_per_second']:.1f}",
                )
            )
            cards.append(
                (f"{best['tokens_per_round']:.2f}", f"its tokens per round; {self.base} has {plain['tokens_per_round']:.2f}")
            )
        cards.append((f"{plain['loop_share']:.0%}", "of the answers' tokens repeat what the answer already said"))
        boxes = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(words)}</span></div>' for big, words in cards)
        return f'<div class="cards">{boxes}</div>'

    # Drawings

    def figure(self, title: str, words: str, drawing: str, names: Sequence[str] | None = None) -> str:
        shown = "".join(
            f'<span><i style="background:var(--c{self.colour(name)})"></i>{escape(short(name))}</span>'
            for name in names or ()
        )
        legend = f'<div class="legend">{shown}</div>' if names else ""
        return f'<h2>{escape(title)}</h2><p class="soft">{escape(words)}</p><figure>{legend}{drawing}</figure>'

    def _groups(self) -> dict[str, dict[str, Content]]:
        """Tables by group, but for sums of some of them; by number of texts where none were written alone."""
        tables = {name: table for name, table in self.found["tables"].items() if " + " not in name}
        tables = tables or {f"{batch} texts": table for batch, table in self.found["batches"].items()}
        return {name: {row["contender"]: row for row in table} for name, table in tables.items()}

    def speedups(self) -> str:
        groups = self._groups()
        if not groups or not self.others:
            return ""
        series, spans = {}, {}
        for name in self.others:
            rows = [group.get(name, {}) for group in groups.values()]
            series[name] = [_told(row) for row in rows]
            spans[name] = [(row["low"], row["high"]) if _told(row) and row.get("low") is not None else None for row in rows]
        drawing = bars(list(groups), series, "speed-up by method", "x", spans, 1.0, self.colour)
        words = (
            f"Over {self.base} on the same prompts; the dashed line is {self.base} itself. A whisker is where 95 of 100 "
            "samples of the prompts would put it. A dash: no speed-up, for the text is another, there is no answer, or the "
            "figure is noise."
        )
        return self.figure("Speed-up", words, drawing, self.others)

    def rounds(self) -> str:
        groups = self._groups()
        if not groups:
            return ""
        rows = {name: [group.get(name, {}) for group in groups.values()] for name in self.names}
        series = {name: [row.get("tokens_per_round") or None for row in some] for name, some in rows.items()}
        series = {name: row for name, row in series.items() if any(value and value > 1 for value in row)}
        if not series:
            return ""
        drawing = bars(list(groups), series, "tokens per round by method", rule=1.0, colour=self.colour)
        words = "How many tokens one pass of the model decides; its own is among them, so without guesses it is 1."
        return self.figure("Tokens per round", words, drawing, list(series))

    def depths(self) -> str:
        shares = {row["contender"]: row.get("accepted_per_position") or [] for row in self.overall}
        series = {name: [(place, share) for place, share in enumerate(row, 1)] for name, row in shares.items() if row}
        if not series:
            return ""
        drawing = lines(series, "acceptance by depth", "depth of the guess", "kept, of all drafts", colour=self.colour)
        words = "Of all drafts, the share whose first, second, third, ... token was kept."
        return self.figure("Acceptance by depth", words, drawing, list(series))

    def batches(self) -> str:
        batches = self.found["batches"]
        if len(batches) < 2:
            return ""
        series: dict[str, list[tuple[float, float]]] = {}
        for batch, rows in batches.items():
            for row in rows:
                if row["contender"] != self.base and _told(row) is not None:
                    series.setdefault(row["contender"], []).append((int(batch), row["speedup"]))
        series = {name: points for name, points in series.items() if len(points) > 1}
        if not series:
            return ""
        drawing = lines(
            series, "speed-up by batch", "texts at once", f"over {self.base}", "x", 1.0, True, colour=self.colour
        )
        stops = {short(name): stop for name, stop in self.found.get("stops_paying", {}).items()}
        told = "".join(f" {words[0].upper()}{words[1:]}." for words in stop_words(stops, [int(batch) for batch in batches]))
        return self.figure("Many texts at once", f"Against {self.base} at the same batch.{told}", drawing, list(series))

    def split(self) -> str:
        found = self.found.get("roofline", {}).get("split", {})
        rows = {name: parts for name, parts in found.items() if "failed" not in parts}
        if not rows:
            return ""
        parts = next(iter(rows.values()))
        legend = _legend(dict(zip(parts, PART_COLOURS, strict=False)))
        drawing = legend + stacked(rows, "where the time of a round goes", " ms")
        words = "Milliseconds of one round: guessing, the model's pass, choosing what is kept, and the host around it."
        return self.figure("Where a round goes", words, drawing)

    def cost(self) -> str:
        found = self.found.get("roofline", {})
        passes = found.get("passes")
        if not isinstance(passes, list):
            return ""
        series = {"measured": [(one["rows"], one["ms"]) for one in passes]}
        series["floor"] = [(one["rows"], one["floor_ms"]) for one in passes]
        knee = found["knee"]
        mark = None if knee["beyond"] else (knee["rows"], f"knee, {knee['rows']:.0f} rows")
        drawing = lines(
            series,
            "milliseconds of a pass by its rows",
            "rows in the pass",
            "milliseconds",
            doubling=True,
            mark=mark,
            colour=lambda name: 1 if name == "measured" else 0,
            dashed=["floor"],
        )
        words = f"{pass_words(found)} The dashed line is the floor."
        return self.figure("What a pass costs", words, drawing)

    # Tables

    def economy(self) -> str:
        found = {n: one for n, one in self.found.get("roofline", {}).get("methods", {}).items() if "failed" not in one}
        if not found:
            return ""
        heads = ["method", *(head.format(base=self.base) for head in ECONOMY_HEADS)]
        body = [[short(name), *economy_cells(one)] for name, one in found.items()]
        words = f"A method pays where its round decides more tokens than it costs in rounds of {self.base}."
        return f'<h2>Break-even</h2><p class="soft">{words}</p>{_table(heads, body)}'

    def tables(self) -> str:
        parts = [self._part(self.found, "")]
        parts += [self._part(part, f", T={heat}") for heat, part in self.found.get("temperatures", {}).items()]
        return "<h2>Figures</h2>" + "".join(parts)

    def _part(self, part: Content, suffix: str) -> str:
        heads = ["contender", *(head.format(base=self.base) for head in HEADS)]
        found = ""
        for name, rows in part["tables"].items():
            found += f"<h3>{escape(name + suffix)}</h3>{_table(heads, [[short(r['contender']), *cells(r)] for r in rows])}"
        for title, (heads, body) in side_by_side(part["batches"], self.base).items():
            found += f"<h3>{escape(title + suffix)}</h3>{_table(heads, [[short(name), *row] for name, *row in body])}"
        return found

    def troubles(self) -> str:
        told = trouble_words(self.found)
        if not told:
            return ""
        return "<h2>Failed, left out or in doubt</h2><ul>" + "".join(f"<li>{escape(words)}</li>" for words in told) + "</ul>"

    def origin(self) -> str:
        about = self.found["about"]
        facts = {
            "command": about["command"],
            "commit": about["commit"],
            "date": about["date"],
            "machine": about["machine"],
            **about.get("versions", {}),
        }
        rows = "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(str(v))}</code></td></tr>" for k, v in facts.items())
        return f'<h2>Where this comes from</h2><div class="table origin"><table>{rows}</table></div>'


def _told(row: Content) -> float | None:
    """A speed-up to draw: none that noise made."""
    return None if row.get("noise") else row.get("speedup")


def _legend(colours: dict[str, int]) -> str:
    marks = (f'<span><i style="background:var(--c{c})"></i>{escape(name)}</span>' for name, c in colours.items())
    return f'<div class="legend">{"".join(marks)}</div>'


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f'<div class="table"><table><tr>{top}</tr>{rows}</table></div>'


def html(found: Content) -> str:
    return HtmlReport(found).html()
