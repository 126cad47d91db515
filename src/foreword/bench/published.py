"""The tables of pages such as the README, made from results and checked against them.

A page says where a table comes from in a line before it: `<!-- foreword bench table FOLDER -->`. `refreshed` writes what
stands behind such lines anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from foreword.bench.markdown import same_words, speedup_words, table_lines
from foreword.bench.report import read_results
from foreword.errors import InputError

MARK = re.compile(r"<!-- foreword bench table (\S+) -->\n\n?(?:\|.*\n?)*\n?")
CALLED = {
    "hf": "`generate` of transformers",
    "hf_static": "the same, static cache and compiled",
    "hf_lookup": "its prompt lookup",
    "hf_assistant": "its assisted generation",
}


def published_table(found: dict[str, Any]) -> str:
    """Overall, one text at a time."""
    if not found["tables"]:
        raise InputError("these results have no table of one text at a time; let 1 be in --batch")
    base = found["base"]
    heads = ["", "tokens/s", f"over our own `{base}`", "tokens a round", f"same tokens as `{base}`"]
    body = [
        [
            CALLED.get(row["contender"], f"`{row['contender']}`"),
            f"{row['tokens_per_second']:.1f}",
            speedup_words(row),
            f"{row['tokens_per_round']:.2f}",
            same_words(row),
        ]
        for row in found["tables"]["overall"]
    ]
    return "\n".join(table_lines(heads, body)) + "\n"


def refreshed(text: str, root: Path) -> str:
    """A page with every table behind a mark made anew; folders are read from `root`."""

    def table(mark: re.Match[str]) -> str:
        return f"<!-- foreword bench table {mark[1]} -->\n\n{published_table(read_results(root / mark[1]))}\n"

    return MARK.sub(table, text)
