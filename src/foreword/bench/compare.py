"""Two results side by side: what became faster or slower, and whether the prompts at hand can tell.

In: two results.json, of this version or an earlier one. Out: a `Change` for each table and contender that both have, one
text at a time. The interval is over the prompts that both answered; a change whose interval holds 1 cannot be told.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from foreword.bench.figures import Timing, middle, resampled

Content = dict[str, Any]
SETTINGS = ("machine", "threads", "model", "dtype", "versions", "commit")


@dataclass(frozen=True)
class Change:
    table: str
    contender: str
    before: float  # tokens a second
    after: float
    ratio: float
    low: float | None
    high: float | None
    tokens_per_round: tuple[float, float]
    speedup: tuple[float | None, float | None]

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return "too few prompts to tell"
        if self.low <= 1 <= self.high:
            return "no change that can be told"
        return "faster" if self.low > 1 else "slower"


def changes(before: Content, after: Content) -> list[Change]:
    spent = [_by_prompt(found) for found in (before, after)]
    found = []
    for name, table in after["tables"].items():
        old = {row["contender"]: row for row in before["tables"].get(name, ())}
        for row in table:
            if row["contender"] in old:
                found.append(_change(name, old[row["contender"]], row, spent))
    return found


def _change(table: str, old: Content, new: Content, spent: list[dict[tuple[str, str, str], list[float]]]) -> Change:
    name = new["contender"]
    keys = [key for key in spent[1] if key[0] == name and _belongs(key[1], table) and key in spent[0]]
    low, high = resampled([[*spent[1][key], *spent[0][key]] for key in keys])
    return Change(
        table=table,
        contender=name,
        before=old["tokens_per_second"],
        after=new["tokens_per_second"],
        ratio=new["tokens_per_second"] / old["tokens_per_second"] if old["tokens_per_second"] else 0.0,
        low=low,
        high=high,
        tokens_per_round=(old["tokens_per_round"], new["tokens_per_round"]),
        speedup=(old["speedup"], new["speedup"]),
    )


def _belongs(group: str, table: str) -> bool:
    """Tables are called overall, by a group, by several that are summed, or by a set's name before a group's."""
    return table == "overall" or group in table.split(" + ") or table.endswith(f": {group}")


def _by_prompt(found: Content) -> dict[tuple[str, str, str], list[float]]:
    """By contender, group and prompt: tokens and seconds, all turns together."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for timing in middle(read_timings(found)):
        if not timing.failed:
            of_prompt = sums.setdefault((timing.contender, timing.group, timing.prompt), [0.0, 0.0])
            of_prompt[0] += timing.tokens
            of_prompt[1] += timing.seconds
    return {key: spent for key, spent in sums.items() if spent[0]}


def read_timings(found: Content) -> list[Timing]:
    """Of one text at a time, at the first temperature. Earlier versions did not say which block a timing is of."""
    known = {field.name for field in fields(Timing)}
    rows = [row for row in found["timings"] if row.get("batch", 1) == 1]
    rows = [row for row in rows if row.get("temperature", 0.0) == found["temperature"]]
    return [Timing(**({"block": place} | {k: v for k, v in row.items() if k in known})) for place, row in enumerate(rows)]


def settings_that_differ(before: Content, after: Content) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (before["about"].get(name), after["about"].get(name)) for name in SETTINGS}
    pairs["max_new_tokens"] = (before["max_new_tokens"], after["max_new_tokens"])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
