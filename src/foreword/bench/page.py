"""`report.html`: the report as one self-contained page with charts.

In: the dictionary of `report.content`, or a results.json of an earlier version. Out: HTML that includes its style and its
SVG. A chart whose figures were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from foreword.bench.markdown import (
    ECONOMY_HEADS,
    HEADS,
    batch_tables,
    cells,
    economy_cells,
    pass_sentences,
    run_sentences,
    speedup_cell,
    stops_paying_sentences,
    temperature_names,
    warning_sentences,
    widened_sentences,
)
from foreword.bench.svg import STYLE, bars, lines, short, stacked

Content = dict[str, Any]
COLOURS = 14  # in the style sheet
STAGE_COLOURS = (2, 1, 3, 0)  # of the stages of a round, as in the style sheet


class HtmlReport:
    """The page of one report. The base is grey; the other contenders get colours in their order."""

    def __init__(self, found: Content) -> None:
        self.found, self.base = found, found["base"]
        batch, tables = next(iter(found["batches"]), 1), [*found["tables"].values()]
        first: list[Content] = tables[0] if tables else found["batches"][batch]
        self.at_batch = "" if int(batch) == 1 else f" at batch {batch}"
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
        widened = f"<p>{escape(widened_sentences(about['grown']))}</p>" if "grown" in about else ""
        first, *others = temperature_names(self.found)
        charts = f" The charts show {first} outputs." if others else ""
        name, sentences = escape(about.get("model") or "Benchmark"), escape(run_sentences(self.found) + charts)
        return f'<h1>{name}</h1><p class="soft">{sentences}</p>{widened}'

    def cards(self) -> str:
        drawable = [row for row in self.overall if _drawable_speedup(row) is not None and row["contender"] != self.base]
        best = max(drawable, key=lambda row: row["speedup"], default=None)
        plain = next(row for row in self.overall if row["contender"] == self.base)
        cards = []
        if best is not None:
            cards.append(
                (
                    speedup_cell(best).partition(" [")[0],
                    f"the fastest, {short(best['contender'])}, over {self.base}{self.at_batch}",
                )
            )
            cards.append(
                (
                    f"{best['tokens_per_second']:.1f}",
                    f"its tokens per second; {self.base} has {plain['tokens_per_second']:.1f}",
                )
            )
            cards.append(
                (f"{best['tokens_per_round']:.2f}", f"its tokens per round; {self.base} has {plain['tokens_per_round']:.2f}")
            )
        cards.append((f"{plain['loop_share']:.0%}", "of the answers' tokens repeat an 8-gram of the same answer"))
        boxes = "".join(f'<div class="card"><b>{escape(big)}</b><span>{escape(label)}</span></div>' for big, label in cards)
        return f'<div class="cards">{boxes}</div>'

    # Charts

    def figure(self, title: str, caption: str, drawing: str, names: Sequence[str] | None = None) -> str:
        shown = "".join(
            f'<span><i style="background:var(--c{self.colour(name)})"></i>{escape(short(name))}</span>'
            for name in names or ()
        )
        legend = f'<div class="legend">{shown}</div>' if names else ""
        return f'<h2>{escape(title)}</h2><p class="soft">{escape(caption)}</p><figure>{legend}{drawing}</figure>'

    def _groups(self) -> dict[str, dict[str, Content]]:
        """Return the tables by group, without sums of groups; by batch size if batch 1 was not timed."""
        tables = {name: table for name, table in self.found["tables"].items() if " + " not in name}
        tables = tables or {f"batch {batch}": table for batch, table in self.found["batches"].items()}
        return {name: {row["contender"]: row for row in table} for name, table in tables.items()}

    def speedups(self) -> str:
        groups = self._groups()
        if not groups or not self.others:
            return ""
        series, spans = {}, {}
        for name in self.others:
            rows = [group.get(name, {}) for group in groups.values()]
            series[name] = [_drawable_speedup(row) for row in rows]
            spans[name] = [
                (row["low"], row["high"]) if _drawable_speedup(row) and row.get("low") is not None else None for row in rows
            ]
        drawing = bars(list(groups), series, "speed-up by method", "x", spans, 1.0, self.colour)
        caption = (
            f"Over {self.base} on the same prompts; the dashed line is {self.base} itself. A whisker is the 95% interval "
            "over the prompts. A dash means no speed-up: the output differs, there is no answer, or the figure is noise."
        )
        return self.figure("Speed-up", caption, drawing, self.others)

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
        caption = "Tokens that one pass of the model decides, its own token included: 1 without drafts."
        return self.figure("Tokens per round", caption, drawing, list(series))

    def depths(self) -> str:
        shares = {row["contender"]: row.get("accepted_per_position") or [] for row in self.overall}
        series = {name: [(place, share) for place, share in enumerate(row, 1)] for name, row in shares.items() if row}
        if not series:
            return ""
        drawing = lines(
            series, "acceptance by depth", "depth of the draft token", "accepted, of all drafts", colour=self.colour
        )
        caption = "The share of drafts whose first, second, third, ... token was accepted."
        return self.figure("Acceptance by depth", caption, drawing, list(series))

    def batches(self) -> str:
        batches = self.found["batches"]
        if len(batches) < 2:
            return ""
        series: dict[str, list[tuple[float, float]]] = {}
        for batch, rows in batches.items():
            for row in rows:
                if row["contender"] != self.base and _drawable_speedup(row) is not None:
                    series.setdefault(row["contender"], []).append((int(batch), row["speedup"]))
        series = {name: points for name, points in series.items() if len(points) > 1}
        if not series:
            return ""
        drawing = lines(
            series, "speed-up by batch size", "batch size", f"over {self.base}", "x", 1.0, True, colour=self.colour
        )
        stops = {short(name): stop for name, stop in self.found.get("stops_paying", {}).items()}
        sentences = stops_paying_sentences(stops, [int(batch) for batch in batches])
        stopping = "".join(f" {sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
        caption = f"Over {self.base} at the same batch size.{stopping}"
        return self.figure("Speed-up by batch size", caption, drawing, list(series))

    def split(self) -> str:
        found = self.found.get("roofline", {}).get("split", {})
        rows = {name: stages for name, stages in found.items() if "failed" not in stages}
        if not rows:
            return ""
        stages = next(iter(rows.values()))
        legend = _legend(dict(zip(stages, STAGE_COLOURS, strict=False)))
        drawing = legend + stacked(rows, "time of a round by stage", " ms")
        caption = "Milliseconds of one round: drafting, the model's pass, acceptance, and the host around them."
        return self.figure("Time of a round", caption, drawing)

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
        caption = f"{pass_sentences(found)} The dashed line is the floor."
        return self.figure("Cost of a pass", caption, drawing)

    # Tables

    def economy(self) -> str:
        found = {n: one for n, one in self.found.get("roofline", {}).get("methods", {}).items() if "failed" not in one}
        if not found:
            return ""
        heads = ["method", *(head.format(base=self.base) for head in ECONOMY_HEADS)]
        body = [[short(name), *economy_cells(one)] for name, one in found.items()]
        caption = f"A method pays if its round decides more tokens than it costs in rounds of {self.base}."
        return f'<h2>Break-even</h2><p class="soft">{caption}</p>{_table(heads, body)}'

    def tables(self) -> str:
        sections = [self._tables(self.found, "")]
        sections += [
            self._tables(section, f", T={temperature}")
            for temperature, section in self.found.get("temperatures", {}).items()
        ]
        return "<h2>Figures</h2>" + "".join(sections)

    def _tables(self, section: Content, suffix: str) -> str:
        heads = ["contender", *(head.format(base=self.base) for head in HEADS)]
        found = ""
        for name, rows in section["tables"].items():
            found += f"<h3>{escape(name + suffix)}</h3>{_table(heads, [[short(r['contender']), *cells(r)] for r in rows])}"
        for title, (heads, body) in batch_tables(section["batches"], self.base).items():
            found += f"<h3>{escape(title + suffix)}</h3>{_table(heads, [[short(name), *row] for name, *row in body])}"
        return found

    def troubles(self) -> str:
        sentences = warning_sentences(self.found)
        if not sentences:
            return ""
        return (
            "<h2>Failed, left out or in doubt</h2><ul>"
            + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
            + "</ul>"
        )

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
        return f'<h2>Origin</h2><div class="table origin"><table>{rows}</table></div>'


def _drawable_speedup(row: Content) -> float | None:
    """Return the speed-up to draw; None for noise."""
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
