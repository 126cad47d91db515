"""`report.md`: the content of results.json as sentences and tables. The terminal and the HTML page use the sentences too.

In: the dictionary of `report.content`, or a results.json of an earlier version. Out: Markdown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

Content = dict[str, Any]
NAMED = 4  # prompts of a failed block that are named; results.json has all
STEADY = 0.04  # by how much the time of a pass may change during a run; replays repeat to a hundredth


def markdown(found: Content) -> str:
    base, names = found["base"], temperature_names(found)
    first = f", {names[0]}" if len(names) > 1 else ""  # for sections that only the first temperature has
    lines = ["# Benchmark", "", f"`{found['about']['command']}`", "", run_sentences(found)]
    if "grown" in found["about"]:
        lines += ["", widened_sentences(found["about"]["grown"])]
    lines += _temperature_lines(found, base, "")
    for temperature, section in found.get("temperatures", {}).items():
        lines += _temperature_lines(section, base, f", T={temperature}")
    lines += _failure_lines(found)
    if found.get("roofline"):
        lines += _roofline_lines(found["roofline"], base, first)
    if found.get("spec_bench"):
        lines += _spec_bench_lines(found["spec_bench"], first)
    lines += _warm_up_lines(found)
    return "\n".join(lines) + "\n"


def _warm_up_lines(found: Content) -> list[str]:
    """Report the warm-up. For a resumed run, the time before the interruption is unknown."""
    warm = [f"batch {batch}: {sum(spent.values()):.1f} s" for batch, spent in found.get("warm_up_s", {}).items() if spent]
    since = " (since the run resumed)" if found["about"].get("resumed") else ""
    sentence = f"Warm-up and capture of all contenders, not included in the figures above{since}: {', '.join(warm)}."
    return ["", sentence] if warm else []


def run_sentences(found: Content) -> str:
    about = found["about"]
    facts = [about.get("model"), about["machine"], f"{about['threads']} threads", about.get("dtype")]
    facts += [f"commit {about['commit']}", about["date"]]
    chosen = " and ".join(temperature_names(found))
    chosen = chosen[0].upper() + chosen[1:]
    repeats = f", the median of {found['repeats']} runs" if found.get("repeats", 1) > 1 else ""
    resumed = (
        f" The run was interrupted after {about['resumed']} blocks of prompts and resumed." if about.get("resumed") else ""
    )
    return (
        f"{', '.join(fact for fact in facts if fact)}. {chosen}, at most {found['max_new_tokens']} new tokens{repeats}. "
        "Speeds are tokens over wall seconds, prompt included. In brackets: the 95% bootstrap interval of the speed-up over "
        "the prompts. Loop share: share of tokens in an 8-gram that the answer already had."
        f"{resumed}"
    )


def temperature_names(found: Content) -> list[str]:
    """Return the temperatures that have tables, as text."""
    temperatures = [found.get("temperature") or 0.0, *map(float, found.get("temperatures", {}))]
    return [f"T={temperature:g}" if temperature else "greedy" for temperature in temperatures]


HEADS = (
    "tokens/s",
    "over {base}",
    "first token, ms",
    "then tokens/s",
    "tokens per round",
    "loop share",
    "same output as {base}",
)


def cells(row: Content) -> list[str]:
    """Return the cells of a row under HEADS."""
    first, then = row.get("first_token_s"), row.get("decode_tokens_per_second")
    return [
        figure_cell(row, "tokens_per_second", ".1f"),
        speedup_cell(row),
        "-" if first is None else f"{first * 1e3:.1f}",
        "-" if then is None else f"{then:.1f}",
        figure_cell(row, "tokens_per_round", ".2f"),
        figure_cell(row, "loop_share", ".0%"),
        same_output_cell(row),
    ]


def figure_cell(row: Content, name: str, form: str) -> str:
    """Format a figure of a row; a dash if the contender has no answers."""
    return format(row[name], form) if row["prompts"] else "-"


BATCH_HEADS = tuple(head for head in HEADS if head not in ("first token, ms", "then tokens/s"))


def batch_tables(batches: Content, base: str) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return heads and lines of the tables of batches above 1, by their titles; they have no first-token columns."""
    heads = ["contender", *(head.format(base=base) for head in BATCH_HEADS)]
    return {
        f"overall, batch {batch}": (heads, [[row["contender"], *_batch_cells(row)] for row in table])
        for batch, table in batches.items()
        if int(batch) > 1
    }


def _batch_cells(row: Content) -> list[str]:
    return [cell for head, cell in zip(HEADS, cells(row), strict=True) if head in BATCH_HEADS]


def same_output_cell(row: Content) -> str:
    """Count the outputs that equal the base's, and the others by kind."""
    kinds = (("ties", "ties"), ("differing", "other"), ("failed", "failed"))
    others = [f"{row[key]} {kind}" for key, kind in kinds if row.get(key)]
    return ", ".join([f"{row['identical']} of {row['prompts']}", *others])


def speedup_cell(row: Content) -> str:
    """Format a speed-up with its interval; or say why there is none, or why it is noise."""
    if row["speedup"] is None:
        return f"none: {row.get('refused', 'other output')}"
    if row.get("noise"):
        return f"{row['speedup']:.2f}x ({row['noise']})"
    if row.get("low") is None or abs(row["high"] - row["low"]) < 1e-9:
        return f"{row['speedup']:.2f}x"
    return f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"


def _temperature_lines(section: Content, base: str, suffix: str) -> list[str]:
    lines: list[str] = []
    for name, table in section["tables"].items():
        lines += ["", f"## {name}, batch 1{suffix}", ""]
        lines += table_lines(
            ["contender", *(head.format(base=base) for head in HEADS)], [[r["contender"], *cells(r)] for r in table]
        )
    several = batch_tables(section["batches"], base)
    for title, (heads, body) in several.items():
        lines += ["", f"## {title}{suffix}", "", *table_lines(heads, body)]
    return lines + (_batch_lines(section, base, suffix) if several else [])


def table_lines(heads: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(line)} |" for line in (heads, *body)]
    return [lines[0].replace("|  |", "| |", 1), "|---" * len(heads) + "|", *lines[1:]]


def _batch_lines(section: Content, base: str, suffix: str) -> list[str]:
    """Tabulate the speed-ups by batch size, and say at which batch each method stops paying."""
    stops = stops_paying_sentences(section["stops_paying"], [int(batch) for batch in section["batches"]])
    table = table_lines(*by_batch(section["batches"]))
    return ["", f"## over {base} by batch{suffix}", "", *table, "", *(f"- {sentence}" for sentence in stops)]


def by_batch(batches: Content) -> tuple[list[str], list[list[str]]]:
    """Return heads and lines of a table with a line per contender: its speed-up at every batch size."""
    ups = {batch: {row["contender"]: speedup_cell(row) for row in table} for batch, table in batches.items()}
    names = dict.fromkeys(name for cells_of in ups.values() for name in cells_of)
    heads = ["contender", *(f"batch {batch}" for batch in batches)]
    return heads, [[name, *(cells_of.get(name, "-") for cells_of in ups.values())] for name in names]


def _failure_lines(found: Content) -> list[str]:
    warnings = warning_sentences(found)
    head = ["", "## Failed, left out or in doubt", "", "Failed prompts are not included in the figures above.", ""]
    return [*head, *(f"- {sentence}" for sentence in warnings)] if warnings else []


def warning_sentences(found: Content) -> list[str]:
    """Return what failed, what was left out, and what is in doubt."""
    sentences = [_failure_sentence(one) for one in found.get("failures", ())]
    sentences += [
        f"Batch {batch}: {count} later turns are left out because they are fewer than the batch."
        for batch, count in (found.get("left_out") or {}).items()
    ]
    sentences += [f"{name} failed in the warm-up: {why}" for name, why in (found.get("warm_up_failed") or {}).items()]
    sentences += _busy_sentences(found)
    sentences += [
        f"{name} is left out: it would draft on the GPU that all share, and slow down the other methods. "
        f"Time it in a run of its own: --methods {name}."
        for name in found.get("apart", ())
    ]
    before = "before it resumed" if found["about"].get("resumed") else "before the run"
    return sentences + _drift_sentences(found.get("pulse") or {}, before)


def _busy_sentences(found: Content) -> list[str]:
    """Say how busy the machine was, and which speed-ups are noise."""
    costs, why_busy = found.get("costs") or {}, (found.get("busy") or {}).get("told")
    sentences = (
        [f"{why_busy[0].upper()}{why_busy[1:]}: speeds and speed-ups may be biased. Run it again when it is quiet."]
        if why_busy
        else []
    )
    if not costs.get("steady", True):
        why = f" ({costs['suspect']})" if costs.get("suspect") else ""
        sentences.append(
            f"The machine was busy while the costs of rows were measured{why}: drafts may have too many or too few rows."
        )
    noisy = [
        f"{row['contender']} {row['speedup']:.2f}x at {row['tokens_per_round']:.2f} tokens per round ({name})"
        for name, rows in _tables(found)
        for row in rows
        if row.get("noise")
    ]
    why = "a round costs at least as much as one of plain decoding, so no speed-up exceeds the tokens per round"
    return sentences + ([f"Noise, not a speed-up: {'; '.join(noisy)}. The reason: {why}."] if noisy else [])


def _tables(found: Content) -> list[tuple[str, list[Content]]]:
    """Return every table with its name."""
    sections = {"": found} | {
        f", T={temperature}": section for temperature, section in found.get("temperatures", {}).items()
    }
    tables = [(name + suffix, rows) for suffix, section in sections.items() for name, rows in section["tables"].items()]
    several = [
        (f"batch {batch}{suffix}", rows)
        for suffix, section in sections.items()
        for batch, rows in section["batches"].items()
        if int(batch) > 1
    ]
    return tables + several


def _drift_sentences(checked: Content, when: str) -> list[str]:
    """Report the clock drift check. Interleaving cannot cancel a permanent slowdown that differs by rows."""
    if "failed" in (whole := checked.get("before", {}) | checked.get("after", {})):
        return [f"The clock drift check could not run: {whole['failed']}"]
    changed = [
        f"{ms:.3f} ms {when} and {checked['after'][rows]:.3f} after it with {rows} row{'s' * (int(rows) > 1)}"
        for rows, ms in checked.get("before", {}).items()
        if abs(checked["after"][rows] / ms - 1) > STEADY
    ]
    sentence = "Speed-ups may be biased: the clock drift check found that the machine changed its speed. A pass took "
    return [sentence + ", ".join(changed) + "."] if changed else []


def _failure_sentence(one: Content) -> str:
    sampled = f", T={one['temperature']:g}" if one["temperature"] else ""
    turn = f", turn {one['turn'] + 1}" if one["turn"] else ""
    prompts = one["prompt"].split() if one.get("texts", 1) > 1 else [one["prompt"]]
    named = " ".join(prompts[:NAMED]) + (f" and {len(prompts) - NAMED} more" if len(prompts) > NAMED else "")
    return f"failed: {one['contender']}, batch {one['batch']}{sampled}, prompt {named}{turn}: {one['why']}"


def _spec_bench_lines(figures: Content, suffix: str) -> list[str]:
    """Tabulate the figures by Spec-Bench's definitions, which differ from ours: see docs/benchmark.md."""
    heads = ["contender", "mean of speeds, tokens/s", "speed-up", "speed-up, baseline retokenized", "mean accepted tokens"]
    body = []
    for name, groups in figures.items():
        if overall := groups.get("overall"):
            ups = [f"{overall[key]:.2f}x" if key in overall else "none" for key in ("speedup", "speedup_retokenized")]
            body.append([name, f"{overall['speed']:.1f}", *ups, f"{overall['mean_accepted_tokens']:.2f}"])
    return ["", f"## As Spec-Bench counts{suffix}", "", *table_lines(heads, body)]


def _roofline_lines(roofline: Content, base: str, suffix: str) -> list[str]:
    if "failed" in roofline:
        return ["", f"The cost of a pass could not be measured: {roofline['failed']}"]
    lines = ["", "## Cost of a pass", "", pass_sentences(roofline)]
    if isinstance(roofline["passes"], list):
        heads = ["rows", "ms", "MB", "GFLOP", "share of bandwidth", "share of operations"]
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
    lines = ["", f"## Time of a round and break-even{suffix}", "", *table_lines(heads, body)]
    return lines + [line for name, why in failed.items() if why for line in ("", f"{name} could not be measured: {why}")]


def pass_sentences(roofline: Content) -> str:
    """Say what the machine can do, how much of it a pass reaches, and from how many rows on rows are expensive."""
    reads, computes = roofline["bytes_per_second"] / 1e9, roofline["operations_per_second"] / 1e12
    sentences = (
        f"One pass of the model after {roofline['context']} tokens. The floor is the time to read the pass's bytes at "
        f"{reads:.0f} GB/s or to compute its operations at {computes:.2f} TFLOP/s, both measured here. "
    )
    passes, knee = roofline["passes"], roofline["knee"]
    if not isinstance(passes, list):
        return sentences + f"Passes could not be measured: {passes['failed']}."
    first, last = passes[0], passes[-1]
    sentences += (
        f"One row reaches {first['bandwidth_share']:.0%} of that bandwidth; {last['rows']} rows reach "
        f"{last['bandwidth_share']:.0%} of it and {last['operations_share']:.0%} of those operations. "
    )
    if knee["beyond"]:
        return sentences + f"Up to {last['rows']} rows there is no knee."
    return sentences + f"At the knee, {knee['rows']:.0f} rows, the rows cost as much as reading the weights."


ECONOMY_HEADS = (
    *("ms per round", "rounds of {base}", "tokens per round", "to break even"),
    *("acceptance", "to break even", "bandwidth in verify"),
)


def economy_cells(one: Content) -> list[str]:
    """Return what a method's round costs and decides, as cells under ECONOMY_HEADS."""
    shares = [one.get(key) for key in ("acceptance", "break_even_acceptance", "verify_bandwidth_share")]
    return [
        f"{one['round_ms']:.3f}" if one["round_ms"] < 10 else f"{one['round_ms']:.1f}",
        f"{one['round_cost']:.2f}",
        f"{one['tokens_per_round']:.2f}",
        f"{one['break_even_tokens_per_round']:.2f}",
        *("-" if share is None else f"{share:.0%}" for share in shares),
    ]


def stops_paying_sentences(stops: dict[str, int | None], batches: Collection[int]) -> list[str]:
    """Say up to which batch size each contender pays; those that are alike share a sentence."""
    alike: dict[str, list[str]] = {}
    for name, stop in stops.items():
        if stop is None:
            verdict = f"still pays at {max(batches)}, the largest tried"
        else:
            verdict = "pays at no batch tried" if stop == min(batches) else f"stops paying at {stop}"
        alike.setdefault(verdict, []).append(name)
    return [f"{verdict}: {', '.join(names)}" for verdict, names in alike.items()]


def widened_sentences(widened: dict[str, Any]) -> str:
    """Describe a widened model, next to its figures. `widened` is the entry `grown` of results.json."""
    ties = f"; the others diverge at near-ties of the model, {widened['ties']} in all" if widened["ties"] else ""
    return (
        f"Widened (grown r={widened['times']}): the model is widened {widened['times']} times to "
        f"{widened['parameters'] / 1e9:.2f} B parameters, with the same outputs. Before timing it generated "
        f"{widened['prompts']} answers with {widened['tokens']} tokens; {widened['identical']} of the answers equal its "
        f"original's to the last token{ties}."
    )
