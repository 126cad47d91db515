"""The run in Spec-Bench's terms: its answer files, and the figures that its own evaluation computes from them.

They differ from ours. Its speed is the mean over questions of tokens / seconds, so a short answer weighs as much as a long
one; ours pools. It retokenizes the baseline's text to count its tokens (minus one for the token that begins a sequence), but
takes a method's tokens as generated. `speedup` here takes both as generated; `speedup_retokenized` is Spec-Bench's. Its
accepted tokens are pooled over rounds, as ours are. Over several repeats it takes the mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from foreword.bench.run import BlockRun, base_of
from foreword.text import Prompt, groups

Record = dict[str, Any]
Runs = list[dict[str, list[Record]]]


def answer_records(block_runs: Iterable[BlockRun], prompts: Sequence[Prompt], decode: Callable[[list[int]], str]) -> Runs:
    """Return, by repeat and contender, a record for each prompt with answers to all turns; batch 1, first temperature."""
    first = [block_run for block_run in block_runs if block_run.place.batch == 1]
    first = [block_run for block_run in first if block_run.place.temperature == first[0].place.temperature]
    names = list(first[0].answers) if first else []
    repeats = sorted({block_run.place.repeat for block_run in first})
    return [
        {
            name: _records([block_run for block_run in first if block_run.place.repeat == run], name, prompts, decode)
            for name in names
        }
        for run in repeats
    ]


def _records(
    block_runs: list[BlockRun], name: str, prompts: Sequence[Prompt], decode: Callable[[list[int]], str]
) -> list[Record]:
    turns: dict[int, list[BlockRun]] = {}
    for block_run in sorted(block_runs, key=lambda block_run: block_run.place.turn):
        turns.setdefault(block_run.tasks[0].index, []).append(block_run)
    return [
        _record(name, prompts[index], of_prompt, decode)
        for index, of_prompt in sorted(turns.items())
        if not any(block_run.answers[name][0].failed for block_run in of_prompt)
    ]


def _record(name: str, prompt: Prompt, block_runs: list[BlockRun], decode: Callable[[list[int]], str]) -> Record:
    answers = [block_run.answers[name][0] for block_run in block_runs]
    choice = {
        "index": 0,
        "turns": [decode(answer.tokens).strip() for answer in answers],
        "decoding_steps": [len(answer.accepted) for answer in answers],
        "new_tokens": [len(answer.tokens) for answer in answers],
        "wall_time": [block_run.seconds[name] for block_run in block_runs],
        "accept_lengths": [count for answer in answers for count in answer.accepted],
    }
    return {"question_id": prompt.id, "category": prompt.category, "model_id": name, "choices": [choice]}


def write_answers(runs: Runs, folder: Path) -> None:
    """Write `answers/RUN/CONTENDER.jsonl` with a line per question."""
    for number, run in enumerate(runs, 1):
        place = folder / "answers" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        for name, records in run.items():
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (place / f"{file_name(name)}.jsonl").write_text(text, encoding="utf-8")


def file_name(contender: str) -> str:
    return re.sub(r"[^\w.-]+", "_", contender)


def spec_bench_figures(
    runs: Runs, prompts: Sequence[Prompt], count: Callable[[str], int]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of Spec-Bench's evaluation by contender and group, `overall` first. `count` tokenizes a text."""
    members = {name: {prompt.id for prompt in some} for name, some in groups(prompts).items()}
    members = {"overall": {prompt.id for prompt in prompts}, **(members if len(members) > 1 else {})}
    names = list(runs[0]) if runs else []
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        by_run = {group: [_figures(run, name, base_of(names), ids, count) for run in runs] for group, ids in members.items()}
        found[name] = {group: _means(figures) for group, figures in by_run.items() if all(figures)}
    return found


def _means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean(run[key] for run in runs) for key in runs[0]}


def _figures(
    run: dict[str, list[Record]], name: str, base: str, ids: set[str], count: Callable[[str], int]
) -> dict[str, float]:
    """Return the figures of one repeat over some questions; empty if the contender and the base share no answers."""
    own, truth = ([record for record in run[one] if record["question_id"] in ids] for one in (name, base))
    shared = {record["question_id"] for record in own} & {record["question_id"] for record in truth}
    own, truth = ([one["choices"][0] for one in some if one["question_id"] in shared] for some in (own, truth))
    if not own:
        return {}
    speed = mean(sum(one["new_tokens"]) / sum(one["wall_time"]) for one in own)
    native = mean(sum(one["new_tokens"]) / sum(one["wall_time"]) for one in truth)
    retokenized = mean(sum(count(text) - 1 for text in one["turns"]) / sum(one["wall_time"]) for one in truth)
    return {
        "speed": speed,
        "speedup": speed / native,
        "speedup_retokenized": speed / retokenized if retokenized > 0 else 0.0,
        "mean_accepted_tokens": mean(length for one in own for length in one["accept_lengths"]),
    }
