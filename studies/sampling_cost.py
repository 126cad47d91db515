"""What sampling settings cost: `python studies/sampling_cost.py --out FILE --prompts FILE`.

The same prompts are answered greedily, at a temperature, and with each filter and penalty added to that, in turns. Out: the
tokens per second of decoding after the first token, and their ratio to the temperature alone. With `plain` a ratio is the
cost of choosing tokens; with a method that drafts, draft tokens are also accepted less or more often.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import foreword
from foreword.api import LLM
from study import first_turns, keep

WARM: dict[str, Any] = {"temperature": 0.8}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": WARM,
    "top-p 0.95": {**WARM, "top_p": 0.95},
    "top-k 50": {**WARM, "top_k": 50},
    "min-p 0.05": {**WARM, "min_p": 0.05},
    "top-p 0.8, top-k 20": {**WARM, "top_p": 0.8, "top_k": 20},
    "repetition penalty 1.1": {**WARM, "repetition_penalty": 1.1},
}


@dataclass(frozen=True)
class Cost:
    """What one setting costs with one method."""

    method: str
    setting: str
    tokens_per_s: float
    over_temperature: float


def speed(llm: LLM, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> float:
    """Return the tokens per second after the first token of each answer, one request at a time."""
    seconds = count = 0.0
    for prompt in prompts:
        stats = llm.generate(prompt, max_new_tokens=tokens, ignore_eos=True, seed=0, **settings).stats
        seconds, count = seconds + stats.decode_s, count + tokens - 1
    return count / seconds


def costs(llm: LLM, prompts: list[list[int]], tokens: int, repeats: int) -> list[Cost]:
    """Time all settings in turns; the first turn records rounds and is not counted."""
    turns = [{name: speed(llm, prompts, tokens, given) for name, given in SETTINGS.items()} for _ in range(repeats + 1)]
    found = {name: median(turn[name] for turn in turns[1:]) for name in SETTINGS}
    return [Cost(llm.method, name, rate, rate / found["temperature"]) for name, rate in found.items()]


def sampling_cost(
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")],
    per_group: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 1,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "plain",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="How often each setting is timed.")] = 3,
    model: Annotated[str | None, typer.Option(help="A model folder, file, name or id.")] = None,
) -> None:
    """Time sampling settings side by side."""
    with foreword.load(model, "plain", slots=1, generation_config=False) as llm:
        asked, found = [list(ids) for ids in first_turns(llm, prompts, per_group)], []
        for method in methods.split(","):
            llm.use(method)
            found += costs(llm, asked, tokens, repeats)
        for one in found:
            print(
                f"{one.method:16} {one.setting:24} {one.tokens_per_s:8.1f} tokens/s, {one.over_temperature:.3f}", flush=True
            )
        keep(out, "costs", llm.model, list(map(asdict, found)), prompts=prompts.name, tokens=tokens)


if __name__ == "__main__":
    typer.run(sampling_cost)
