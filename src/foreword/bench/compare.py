"""Compare two results: what became faster or slower, and whether there are enough prompts to tell.

In: two results.json, of this version or an earlier one, each perhaps `pooled` from several runs. Out: a `Change` for each
table and contender that both have, at batch 1, over the prompts that both answered. A change whose interval includes 1 is
not significant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from foreword.bench.figures import Timing, bootstrap_interval, median_repeats, table_groups

Content = dict[str, Any]
SETTINGS = ("machine", "threads", "model", "grown", "dtype", "versions", "commit", "prompts", "rows")
WORKLOAD = ("max_new_tokens", "temperature", "repeats")


@dataclass(frozen=True)
class Change:
    table: str
    contender: str
    before: float  # tokens per second
    after: float
    ratio: float
    low: float | None
    high: float | None
    tokens_per_round: tuple[float, float]
    speedup: tuple[float | None, float | None]
    noise: bool = False  # a speed-up on either side exceeds its tokens per round
    other_lengths: int = 0  # prompts whose outputs have another number of tokens after the change

    def is_below(self, least: float) -> bool:
        """Whether the whole 95% interval of the ratio lies below `least`."""
        return self.high is not None and self.high < least

    @property
    def verdict(self) -> str:
        if self.noise:
            return "noise"
        if self.low is None or self.high is None:
            return "too few prompts to tell"
        if self.low <= 1 <= self.high:
            return "no significant change"
        return "faster" if self.low > 1 else "slower"


def pooled(runs: Sequence[Content]) -> Content:
    """Join several runs of the same benchmark: of each prompt the median time counts. The speed of a machine drifts, so runs
    of two commits are made in turns and pooled."""
    timings, first = [], 0
    for run in runs:
        timings += [{**row, "repeat": row.get("repeat", 0) + first} for row in run["timings"]]
        first = 1 + max((row["repeat"] for row in timings), default=0)
    return {**runs[0], "timings": timings, "repeats": sum(run["repeats"] for run in runs)}


def changes(before: Content, after: Content) -> list[Change]:
    """Return the changes, table by table of `after`. A contender needs prompts of that table that both results have."""
    timings = read_timings(after)
    old, new = _by_prompt(read_timings(before)), _by_prompt(timings)
    group = {timing.prompt: (timing.suite, timing.group) for timing in timings}
    groups_of = table_groups(list(dict.fromkeys(group.values())))
    found = []
    for name, table in after["tables"].items():
        rows = {row["contender"]: row for row in before["tables"].get(name, ())}
        for row in table:
            contender = row["contender"]
            keys = [key for key in new if key in old and key[0] == contender and group[key[1]] in groups_of.get(name, ())]
            if contender in rows and keys:
                sides = rows[contender], row
                found.append(_change(name, contender, [(old[key], new[key]) for key in keys], sides))
    return found


def _change(table: str, contender: str, pairs: list[Any], sides: tuple[Content, Content]) -> Change:
    """Compare the same prompts on both sides; `pairs`: for each, tokens, seconds and rounds before and after."""
    old, new = np.array(pairs).sum(0).tolist()
    low, high = bootstrap_interval([[*after[:2], *before[:2]] for before, after in pairs])
    before, after = old[0] / old[1], new[0] / new[1]
    per_round = old[0] / max(old[2], 1), new[0] / max(new[2], 1)
    speedup, noise = (sides[0]["speedup"], sides[1]["speedup"]), any(side.get("noise") for side in sides)
    others = sum(one[0] != other[0] for one, other in pairs)
    return Change(table, contender, before, after, after / before, low, high, per_round, speedup, noise, others)


def _by_prompt(timings: list[Timing]) -> dict[tuple[str, str], list[float]]:
    """Sum tokens, seconds and rounds by contender and prompt over the turns; leave out prompts with a failed turn."""
    turns: dict[tuple[str, str], list[Timing]] = {}
    for timing in median_repeats(timings):
        turns.setdefault((timing.contender, timing.prompt), []).append(timing)
    return {
        key: [sum(t.tokens for t in of), sum(t.seconds for t in of), sum(t.rounds for t in of)]
        for key, of in turns.items()
        if not any(t.failed for t in of)
    }


def read_timings(found: Content) -> list[Timing]:
    """Return the timings of batch 1 at the first temperature. In results of earlier versions `block`, and in the first ones
    also `identical`, is missing."""
    known = {field.name for field in fields(Timing)}
    rows = [row for row in found["timings"] if row.get("batch", 1) == 1]
    rows = [row for row in rows if row.get("temperature", 0.0) == found["temperature"]]
    return [
        Timing(**({"block": place, "identical": 0} | {k: v for k, v in row.items() if k in known}))
        for place, row in enumerate(rows)
    ]


def settings_that_differ(before: Content, after: Content) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (before["about"].get(name), after["about"].get(name)) for name in SETTINGS}
    pairs |= {name: (before[name], after[name]) for name in WORKLOAD}
    if "prompts_sha256" in before["about"].keys() & after["about"].keys():
        pairs["prompts_sha256"] = (before["about"]["prompts_sha256"], after["about"]["prompts_sha256"])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
