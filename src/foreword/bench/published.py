"""The tables of pages such as the README, made from results and checked against them.

A page says where a table comes from in a line before it: `<!-- foreword bench table FOLDER -->`, with `--batch N` for the
table of N texts side by side and `--temperature T` for that of drawn texts. `refreshed` writes what stands behind such lines
anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from foreword.bench.markdown import same_words, speedup_words, table_lines, told
from foreword.bench.report import read_results
from foreword.errors import InputError

MARK = re.compile(
    r"<!-- foreword bench table (?P<folder>\S+)(?: --batch (?P<batch>\d+))?(?: --temperature (?P<heat>[\d.]+))? -->"
    r"\n\n?(?:\|.*\n?)*\n?"
)
CALLED = {
    "hf": "`generate` of transformers",
    "hf_static": "the same, static cache and compiled",
    "hf_lookup": "its prompt lookup",
    "hf_assistant": "its assisted generation",
}


def published_table(found: dict[str, Any], batch: int = 1, temperature: float | None = None) -> str:
    """Overall, so many texts at a time; at the temperature that the results begin with unless one is named."""
    base = found["base"]
    heads = ["", "tokens/s", f"over our own `{base}`", "tokens per round", f"same tokens as `{base}`"]
    body = [
        [
            CALLED.get(row["contender"], f"`{row['contender']}`"),
            told(row, "tokens_per_second", ".1f"),
            speedup_words(row),
            told(row, "tokens_per_round", ".2f"),
            same_words(row),
        ]
        for row in _rows(found, batch, temperature)
    ]
    return "\n".join(table_lines(heads, body)) + "\n"


def _rows(found: dict[str, Any], batch: int, temperature: float | None) -> list[dict[str, Any]]:
    first = found.get("temperature", 0.0)
    part = found if temperature in (None, first) else found.get("temperatures", {}).get(f"{temperature:g}")
    if part is None:
        raise InputError(f"these results have no texts drawn at {temperature:g}; let it be in --temperature")
    rows: list[dict[str, Any]] | None = part["tables"].get("overall") if batch == 1 else part["batches"].get(str(batch))
    if not rows:
        raise InputError(f"these results have no table of {batch} texts at a time; let {batch} be in --batch")
    return rows


def refreshed(text: str, root: Path) -> str:
    """A page with every table behind a mark made anew; folders are read from `root`."""

    def table(mark: re.Match[str]) -> str:
        line, heat = mark[0].partition("\n")[0], mark["heat"]
        found = read_results(root / mark["folder"])
        return f"{line}\n\n{published_table(found, int(mark['batch'] or 1), float(heat) if heat else None)}\n"

    return MARK.sub(table, text)
