"""The same run in Spec-Bench's terms: its answer files, and the figures that its own evaluation makes of them.

They differ from ours. Its speed is the mean over questions of tokens / seconds, so that a short answer weighs as much as a
long one; ours pools. Its baseline's tokens are counted anew from the text (one less than the tokenizer gives, for the token
that begins a text), where a method's are those it wrote; `speedup` here takes both as written, `speedup_retokenized` is its
own. Its accepted tokens are pooled over rounds, as ours are. Of several repeats it takes the mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from foreword.bench.run import Heat, base_of
from foreword.text import Prompt, groups

Record = dict[str, Any]
Runs = list[dict[str, list[Record]]]


def answer_records(heats: Iterable[Heat], prompts: Sequence[Prompt], decode: Callable[[list[int]], str]) -> Runs:
    """By repeat and contender, a record for each prompt whose turns all have an answer: one text at a time, the first
    temperature."""
    first = [heat for heat in heats if heat.place.batch == 1]
    first = [heat for heat in first if heat.place.temperature == first[0].place.temperature]
    names = list(first[0].answers) if first else []
    repeats = sorted({heat.place.repeat for heat in first})
    return [
        {name: _records([heat for heat in first if heat.place.repeat == run], name, prompts, decode) for name in names}
        for run in repeats
    ]


def _records(heats: list[Heat], name: str, prompts: Sequence[Prompt], decode: Callable[[list[int]], str]) -> list[Record]:
    turns: dict[int, list[Heat]] = {}
    for heat in sorted(heats, key=lambda heat: heat.place.turn):
        turns.setdefault(heat.tasks[0].index, []).append(heat)
    return [
        _record(name, prompts[index], said, decode)
        for index, said in sorted(turns.items())
        if not any(heat.answers[name][0].failed for heat in said)
    ]


def _record(name: str, prompt: Prompt, heats: list[Heat], decode: Callable[[list[int]], str]) -> Record:
    answers = [heat.answers[name][0] for heat in heats]
    choice = {
        "index": 0,
        "turns": [decode(answer.tokens).strip() for answer in answers],
        "decoding_steps": [len(answer.accepted) for answer in answers],
        "new_tokens": [len(answer.tokens) for answer in answers],
        "wall_time": [heat.seconds[name] for heat in heats],
        "accept_lengths": [count for answer in answers for count in answer.accepted],
    }
    return {"question_id": prompt.id, "category": prompt.category, "model_id": name, "choices": [choice]}


def write_answers(runs: Runs, folder: Path) -> None:
    """`answers/RUN/CONTENDER.jsonl`, a line for each question."""
    for number, run in enumerate(runs, 1):
        place = folder / "answers" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        for name, records in run.items():
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (place / f"{file_name(name)}.jsonl").write_text(text, encoding="utf-8")


def file_name(contender: str) -> str:
    return re.sub(r"[^\w.-]+", "_", contender)


def published(runs: Runs, prompts: Sequence[Prompt], count: Callable[[str], int]) -> dict[str, dict[str, dict[str, float]]]:
    """By contender and group, `overall` first, what Spec-Bench's evaluation gives. `count` tokenizes a text."""
    members = {name: {prompt.id for prompt in some} for name, some in groups(prompts).items()}
    members = {"overall": {prompt.id for prompt in prompts}, **(members if len(members) > 1 else {})}
    names = list(runs[0]) if runs else []
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        parts = {group: [_part(run, name, base_of(names), ids, count) for run in runs] for group, ids in members.items()}
        found[name] = {group: _means(part) for group, part in parts.items() if all(part)}
    return found


def _means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: mean(run[key] for run in runs) for key in runs[0]}


def _part(
    run: dict[str, list[Record]], name: str, base: str, ids: set[str], count: Callable[[str], int]
) -> dict[str, float]:
    """Empty where nobody answered."""
    own, truth = ([record for record in run[one] if record["question_id"] in ids] for one in (name, base))
    shared = {record["question_id"] for record in own} & {record["question_id"] for record in truth}
    own, truth = ([one["choices"][0] for one in some if one["question_id"] in shared] for some in (own, truth))
    if not own:
        return {}
    speed = mean(sum(one["new_tokens"]) / sum(one["wall_time"]) for one in own)
    native = mean(sum(one["new_tokens"]) / sum(one["wall_time"]) for one in truth)
    anew = mean(sum(count(text) - 1 for text in one["turns"]) / sum(one["wall_time"]) for one in truth)
    return {
        "speed": speed,
        "speedup": speed / native,
        "speedup_retokenized": speed / anew if anew > 0 else 0.0,
        "mean_accepted_tokens": mean(length for one in own for length in one["accept_lengths"]),
    }
