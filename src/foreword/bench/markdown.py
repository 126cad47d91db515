"""`report.md`: what results.json holds, in words and tables. The words serve the terminal and the HTML page too.

In: the dictionary of `report.content`, or a results.json of an earlier version. Out: Markdown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

Content = dict[str, Any]
NAMED = 4  # prompts of a block that failed; results.json has all
STEADY = 0.04  # by how much a pass may change from before a run to after it; replays repeat to a hundredth


def markdown(found: Content) -> str:
    base, heats = found["base"], heat_words(found)
    first = f", {heats[0]}" if len(heats) > 1 else ""  # of what is known of the first temperature alone
    lines = ["# Benchmark", "", f"`{found['about']['command']}`", "", where_words(found)]
    if "grown" in found["about"]:
        lines += ["", widened_words(found["about"]["grown"])]
    lines += _part_lines(found, base, "")
    for temperature, part in found.get("temperatures", {}).items():
        lines += _part_lines(part, base, f", T={temperature}")
    lines += _failure_lines(found)
    if found.get("roofline"):
        lines += _roofline_lines(found["roofline"], base, first)
    if found.get("spec_bench"):
        lines += _spec_bench_lines(found["spec_bench"], first)
    lines += _warm_up_lines(found)
    return "\n".join(lines) + "\n"


def _warm_up_lines(found: Content) -> list[str]:
    """Of a run that was cut, what was spent before it went on is not known."""
    warm = [f"batch {batch}: {sum(spent.values()):.1f} s" for batch, spent in found.get("warm_up_s", {}).items() if spent]
    since = " (since the run went on)" if found["about"].get("resumed") else ""
    words = f"Warming up and capturing rounds, for all together and in no figure above{since}: {', '.join(warm)}."
    return ["", words] if warm else []


def where_words(found: Content) -> str:
    about = found["about"]
    parts = [about.get("model"), about["machine"], f"{about['threads']} threads", about.get("dtype")]
    parts += [f"commit {about['commit']}", about["date"]]
    chosen = " and ".join(heat_words(found))
    chosen = chosen[0].upper() + chosen[1:]
    repeats = f", the middle one of {found['repeats']} runs" if found.get("repeats", 1) > 1 else ""
    cut = f" The run was cut after {about['resumed']} blocks of prompts, and went on." if about.get("resumed") else ""
    return (
        f"{', '.join(part for part in parts if part)}. {chosen}, at most {found['max_new_tokens']} new tokens{repeats}. "
        "Speeds are tokens over wall seconds, the reading of the prompt included; in brackets, where 95 of 100 samples of "
        "the prompts would put the speed-up. Loop share: tokens inside an 8-gram that the answer already had."
        f"{cut}"
    )


def heat_words(found: Content) -> list[str]:
    """The temperatures that there are tables of, in words."""
    heats = [found.get("temperature") or 0.0, *map(float, found.get("temperatures", {}))]
    return [f"T={heat:g}" if heat else "greedy" for heat in heats]


HEADS = (
    "tokens/s",
    "over {base}",
    "first token, ms",
    "then tokens/s",
    "tokens per round",
    "loop share",
    "same text as {base}",
)


def cells(row: Content) -> list[str]:
    """A row in words, beneath HEADS and the contender's name."""
    first, then = row.get("first_token_s"), row.get("decode_tokens_per_second")
    return [
        told(row, "tokens_per_second", ".1f"),
        speedup_words(row),
        "-" if first is None else f"{first * 1e3:.1f}",
        "-" if then is None else f"{then:.1f}",
        told(row, "tokens_per_round", ".2f"),
        told(row, "loop_share", ".0%"),
        same_words(row),
    ]


def told(row: Content, name: str, form: str) -> str:
    """A figure of a row, if there was an answer to take it from."""
    return format(row[name], form) if row["prompts"] else "-"


BATCH_HEADS = tuple(head for head in HEADS if head not in ("first token, ms", "then tokens/s"))


def side_by_side(batches: Content, base: str) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Heads and lines of the tables of more than one text, by their titles: first tokens are not told apart there."""
    heads = ["contender", *(head.format(base=base) for head in BATCH_HEADS)]
    return {
        f"overall, {batch} texts side by side": (heads, [[row["contender"], *_batch_cells(row)] for row in table])
        for batch, table in batches.items()
        if int(batch) > 1
    }


def _batch_cells(row: Content) -> list[str]:
    return [cell for head, cell in zip(HEADS, cells(row), strict=True) if head in BATCH_HEADS]


def same_words(row: Content) -> str:
    """How many texts are the base's, and what became of the others."""
    kinds = (("ties", "ties"), ("differing", "other"), ("failed", "failed"))
    others = [f"{row[key]} {word}" for key, word in kinds if row.get(key)]
    return ", ".join([f"{row['identical']} of {row['prompts']}", *others])


def speedup_words(row: Content) -> str:
    """A speed-up with its interval, or that there is none or that it is noise, and why."""
    if row["speedup"] is None:
        return f"none: {row.get('refused', 'other text')}"
    if row.get("noise"):
        return f"{row['speedup']:.2f}x ({row['noise']})"
    if row.get("low") is None or abs(row["high"] - row["low"]) < 1e-9:
        return f"{row['speedup']:.2f}x"
    return f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"


def _part_lines(part: Content, base: str, suffix: str) -> list[str]:
    lines: list[str] = []
    for name, table in part["tables"].items():
        lines += ["", f"## {name}, one text at a time{suffix}", ""]
        lines += table_lines(
            ["contender", *(head.format(base=base) for head in HEADS)], [[r["contender"], *cells(r)] for r in table]
        )
    several = side_by_side(part["batches"], base)
    for title, (heads, body) in several.items():
        lines += ["", f"## {title}{suffix}", "", *table_lines(heads, body)]
    return lines + (_batch_lines(part, base, suffix) if several else [])


def table_lines(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(line)} |" for line in (heads, *body)]
    return [lines[0].replace("|  |", "| |", 1), "|---" * len(heads) + "|", *lines[1:]]


def _batch_lines(part: Content, base: str, suffix: str) -> list[str]:
    """How far each is ahead, by the number of texts at once, and where that ends."""
    stops = stop_words(part["stops_paying"], [int(batch) for batch in part["batches"]])
    table = table_lines(*by_batch(part["batches"]))
    return ["", f"## over {base} by batch{suffix}", "", *table, "", *(f"- {words}" for words in stops)]


def by_batch(batches: Content) -> tuple[list[str], list[list[str]]]:
    """Heads and lines of a table: a line for each contender, with its speed-up at every batch."""
    ups = {batch: {row["contender"]: speedup_words(row) for row in table} for batch, table in batches.items()}
    names = dict.fromkeys(name for words in ups.values() for name in words)
    heads = ["contender", *("one text" if int(batch) == 1 else f"{batch} texts" for batch in batches)]
    return heads, [[name, *(words.get(name, "-") for words in ups.values())] for name in names]


def _failure_lines(found: Content) -> list[str]:
    troubles = trouble_words(found)
    head = ["", "## Failed, left out or in doubt", "", "Failed prompts count in no figure above.", ""]
    return [*head, *(f"- {words}" for words in troubles)] if troubles else []


def trouble_words(found: Content) -> list[str]:
    """What failed, what was left out, and what may be doubted."""
    words = [_failure_words(one) for one in found.get("failures", ())]
    words += [
        f"Batch {batch}: {count} later turns are left out, because they could not fill it."
        for batch, count in (found.get("left_out") or {}).items()
    ]
    words += [f"{name} failed at warming up: {why}" for name, why in (found.get("warm_up_failed") or {}).items()]
    words += _busy_words(found)
    words += [
        f"{name} is left out: its draft would be written on the GPU that all share, and slow the others down. "
        f"Time it in a run of its own: --methods {name}."
        for name in found.get("apart", ())
    ]
    before = "before it went on" if found["about"].get("resumed") else "before the run"
    return words + _drift_words(found.get("pulse") or {}, before)


def _busy_words(found: Content) -> list[str]:
    """What speaks against the machine, and which figures show it."""
    costs, told = found.get("costs") or {}, (found.get("busy") or {}).get("told")
    words = [f"{told[0].upper()}{told[1:]}: speeds and speed-ups may lean. Run it again when it is quiet."] if told else []
    if not costs.get("steady", True):
        why = f" ({costs['suspect']})" if costs.get("suspect") else ""
        words.append(f"The machine was busy while costs of rows were measured{why}: more or fewer may be drafted than pay.")
    noisy = [
        f"{row['contender']} {row['speedup']:.2f}x at {row['tokens_per_round']:.2f} tokens per round ({name})"
        for name, rows in _tables(found)
        for row in rows
        if row.get("noise")
    ]
    why = "a round costs at least what one of plain decoding does, so no speed-up exceeds the tokens per round"
    return words + ([f"Noise, and no speed-up: {'; '.join(noisy)}. For {why}."] if noisy else [])


def _tables(found: Content) -> list[tuple[str, list[Content]]]:
    """Every table by its name."""
    parts = {"": found} | {f", T={heat}": part for heat, part in found.get("temperatures", {}).items()}
    tables = [(name + suffix, rows) for suffix, part in parts.items() for name, rows in part["tables"].items()]
    several = [(f"{batch} texts{suffix}", rows) for suffix, part in parts.items() for batch, rows in part["batches"].items()]
    return tables + [(name, rows) for name, rows in several if not name.startswith("1 texts")]


def _drift_words(pulse: Content, when: str) -> list[str]:
    """Report the clock drift check. Interleaving cannot cancel a permanent slowdown that differs by rows."""
    if "failed" in (whole := pulse.get("before", {}) | pulse.get("after", {})):
        return [f"The clock drift check could not run: {whole['failed']}"]
    changed = [
        f"{ms:.3f} ms {when} and {pulse['after'][rows]:.3f} after it with {rows} row{'s' * (int(rows) > 1)}"
        for rows, ms in pulse.get("before", {}).items()
        if abs(pulse["after"][rows] / ms - 1) > STEADY
    ]
    told = "Speed-ups may be biased: the clock drift check found another speed of the machine. A pass took "
    return [told + ", ".join(changed) + "."] if changed else []


def _failure_words(one: Content) -> str:
    drawn = f", T={one['temperature']:g}" if one["temperature"] else ""
    turn = f", turn {one['turn'] + 1}" if one["turn"] else ""
    prompts = one["prompt"].split() if one.get("texts", 1) > 1 else [one["prompt"]]
    named = " ".join(prompts[:NAMED]) + (f" and {len(prompts) - NAMED} more" if len(prompts) > NAMED else "")
    return f"failed: {one['contender']}, batch {one['batch']}{drawn}, prompt {named}{turn}: {one['why']}"


def _spec_bench_lines(figures: Content, suffix: str) -> list[str]:
    """Their own definitions, which differ from ours: see docs/benchmark.md."""
    heads = ["contender", "mean of speeds, tokens/s", "speed-up", "speed-up, baseline counted anew", "mean accepted tokens"]
    body = []
    for name, groups in figures.items():
        if overall := groups.get("overall"):
            ups = [f"{overall[key]:.2f}x" if key in overall else "none" for key in ("speedup", "speedup_retokenized")]
            body.append([name, f"{overall['speed']:.1f}", *ups, f"{overall['mean_accepted_tokens']:.2f}"])
    return ["", f"## As Spec-Bench counts{suffix}", "", *table_lines(heads, body)]


def _roofline_lines(roofline: Content, base: str, suffix: str) -> list[str]:
    if "failed" in roofline:
        return ["", f"What a pass costs could not be measured: {roofline['failed']}"]
    lines = ["", "## What a pass costs", "", pass_words(roofline)]
    if isinstance(roofline["passes"], list):
        heads = ["rows", "ms", "MB", "GFLOP", "of bandwidth", "of operations"]
        body = [
            [f"{one['rows']}", f"{one['ms']:.3f}", f"{one['bytes'] / 1e6:.1f}", f"{one['operations'] / 1e9:.2f}"]
            + [f"{one['bandwidth_share']:.0%}", f"{one['operations_share']:.0%}"]
            for one in roofline["passes"]
        ]
        lines += ["", *table_lines(heads, body)]
    return lines + _round_lines(roofline, base, suffix)


def _round_lines(roofline: Content, base: str, suffix: str) -> list[str]:
    pairs = {name: (roofline["split"][name], one) for name, one in roofline["methods"].items()}
    failed = {name: split.get("failed") or one.get("failed") for name, (split, one) in pairs.items()}
    heads = ["method", "draft ms", "verify ms", "accept ms", "host ms", *(head.format(base=base) for head in ECONOMY_HEADS)]
    body = [
        [name, *(f"{ms:.3f}" for ms in split.values()), *economy_cells(one)]
        for name, (split, one) in pairs.items()
        if not failed[name]
    ]
    lines = ["", f"## Where a round goes, and when it pays{suffix}", "", *table_lines(heads, body)]
    return lines + [line for name, why in failed.items() if why for line in ("", f"{name} could not be measured: {why}")]


def pass_words(roofline: Content) -> str:
    """What the machine can do, what a pass reaches of it, and where rows begin to cost."""
    reads, computes = roofline["bytes_per_second"] / 1e9, roofline["operations_per_second"] / 1e12
    words = (
        f"One pass of the model after {roofline['context']} tokens. The floor is what has to be read at {reads:.0f} GB/s or "
        f"computed at {computes:.2f} TFLOP/s, both measured here. "
    )
    passes, knee = roofline["passes"], roofline["knee"]
    if not isinstance(passes, list):
        return words + f"Passes could not be measured: {passes['failed']}."
    first, last = passes[0], passes[-1]
    words += (
        f"One row reaches {first['bandwidth_share']:.0%} of that bandwidth, {last['rows']} rows "
        f"{last['bandwidth_share']:.0%} of it and {last['operations_share']:.0%} of those operations. "
    )
    if knee["beyond"]:
        return words + f"Up to {last['rows']} rows there is no knee."
    return words + f"At the knee, {knee['rows']:.0f} rows, rows cost as much as the reading of the weights."


ECONOMY_HEADS = (
    *("ms a round", "rounds of {base}", "tokens per round", "to break even"),
    *("kept of guesses", "to break even", "bandwidth in verify"),
)


def economy_cells(one: Content) -> list[str]:
    """What a method's round costs and brings, beneath ECONOMY_HEADS."""
    shares = [one.get(key) for key in ("acceptance", "break_even_acceptance", "verify_bandwidth_share")]
    return [
        f"{one['round_ms']:.3f}" if one["round_ms"] < 10 else f"{one['round_ms']:.1f}",
        f"{one['round_cost']:.2f}",
        f"{one['tokens_per_round']:.2f}",
        f"{one['break_even_tokens_per_round']:.2f}",
        *("-" if share is None else f"{share:.0%}" for share in shares),
    ]


def stop_words(stops: dict[str, int | None], batches: Collection[int]) -> list[str]:
    """Who is ahead up to which batch, those together who are alike."""
    alike: dict[str, list[str]] = {}
    for name, stop in stops.items():
        if stop is None:
            words = f"still pays at {max(batches)}, the largest tried"
        else:
            words = "pays at no batch tried" if stop == min(batches) else f"stops paying at {stop}"
        alike.setdefault(words, []).append(name)
    return [f"{words}: {', '.join(names)}" for words, names in alike.items()]


def widened_words(grown: dict[str, Any]) -> str:
    """What must stand next to every figure of a widened model; `grown` is the key of results.json."""
    ties = f"; the others diverge at near-ties of the model, {grown['ties']} in all" if grown["ties"] else ""
    return (
        f"Grown r={grown['times']}: the model is widened {grown['times']} times, {grown['parameters'] / 1e9:.2f} B "
        f"parameters, with the same outputs. Before timing it wrote {grown['prompts']} answers, {grown['tokens']} tokens; "
        f"{grown['identical']} of them are its original's to the last token{ties}."
    )
