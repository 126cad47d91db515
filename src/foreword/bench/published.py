"""The tables of pages such as the README, made from results and checked against them.

A line before a table names its source: `<!-- foreword bench table FOLDER -->`, with `--batch N` for the table of batch N and
`--temperature T` for that of sampled outputs. `refresh_tables` rewrites the tables after such lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from foreword.bench.markdown import figure_cell, same_output_cell, speedup_cell, table_lines
from foreword.bench.report import read_results
from foreword.errors import InputError

MARK = re.compile(
    r"<!-- foreword bench table (?P<folder>\S+)(?: --batch (?P<batch>\d+))?(?: --temperature (?P<temperature>[\d.]+))? -->"
    r"\n\n?(?:\|.*\n?)*\n?"
)
BASELINE_NAMES = {
    "hf": "`generate` of transformers",
    "hf_static": "the same, static cache and compiled",
    "hf_lookup": "its prompt lookup",
    "hf_assistant": "its assisted generation",
}


def published_table(found: dict[str, Any], batch: int = 1, temperature: float | None = None) -> str:
    """Return the overall table of a batch size, at the given temperature or the first one of the results."""
    base = found["base"]
    heads = ["", "tokens/s", f"over our own `{base}`", "tokens per round", f"same tokens as `{base}`"]
    body = [
        [
            BASELINE_NAMES.get(row["contender"], f"`{row['contender']}`"),
            figure_cell(row, "tokens_per_second", ".1f"),
            speedup_cell(row),
            figure_cell(row, "tokens_per_round", ".2f"),
            same_output_cell(row),
        ]
        for row in _rows(found, batch, temperature)
    ]
    return "\n".join(table_lines(heads, body)) + "\n"


def _rows(found: dict[str, Any], batch: int, temperature: float | None) -> list[dict[str, Any]]:
    first = found.get("temperature", 0.0)
    section = found if temperature in (None, first) else found.get("temperatures", {}).get(f"{temperature:g}")
    if section is None:
        raise InputError(f"these results have no outputs sampled at {temperature:g}; run bench with it in --temperature")
    rows: list[dict[str, Any]] | None = (
        section["tables"].get("overall") if batch == 1 else section["batches"].get(str(batch))
    )
    if not rows:
        raise InputError(f"these results have no table of batch {batch}; run bench with {batch} in --batch")
    return rows


def refresh_tables(text: str, root: Path) -> str:
    """Return a page with every marked table made again; folders are relative to `root`."""

    def table(mark: re.Match[str]) -> str:
        line, temperature = mark[0].partition("\n")[0], mark["temperature"]
        found = read_results(root / mark["folder"])
        return f"{line}\n\n{published_table(found, int(mark['batch'] or 1), float(temperature) if temperature else None)}\n"

    return MARK.sub(table, text)
