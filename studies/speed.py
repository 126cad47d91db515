"""Measure a looped model and its pipeline, the method `speed`: `python studies/speed.py LOOPED --data DIR --out FILE`.

In: a folder that `foreword train looped` wrote, the data that it was trained on, and prompts. Out: rounds per token of the
pipeline; its speed against the same model without a pipeline, against the model cut after its first repeat, and against the
original; and held-out losses of the last exit, the first one and the original. Outputs are compared with plain decoding's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.api import LLM, load
from foreword.bench.report import facts
from foreword.bench.suites import BUILTIN_FILE
from foreword.drafters.resolve import DrafterRequest
from foreword.files import read_json
from foreword.model.fingerprint import Fingerprint
from foreword.model.loading import load_weights
from foreword.model.looped import cut_after_first_repeat
from foreword.model.model import Model
from foreword.results import Result
from foreword.train import TrainingSettings, open_data, split_data
from foreword.train.exits import ExitFigures, exits_of, measure_exits
from study import command, first_turns

METHODS = ("speed", "speed:check=ends")
AT_ONCE = 16  # held-out sequences per pass


@dataclass(frozen=True)
class Timed:
    """How fast a model answered the prompts, one at a time."""

    model: str  # looped, first repeat or original
    method: str
    temperature: float
    rounds_per_token: float
    tokens_per_second: float  # of decoding, without the prompts
    identical: int | None = None  # outputs that equal those of the same model by plain decoding
    over_sequential: float | None = None  # speed-up over the looped model by plain decoding


def timed(llm: LLM, name: str, method: str, prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int) -> Any:
    """Answer the prompts with a method. Return the figures and the results."""
    llm.use(method)
    llm.warm_up(min(max(map(len, prompts)) + new_tokens, llm.engine.max_context), temperature=temperature)
    results: list[Result] = [
        llm.generate(list(ids), max_new_tokens=new_tokens, temperature=temperature, seed=0) for ids in prompts
    ]
    tokens, seconds = sum(len(one.tokens) for one in results), sum(one.stats.decode_s for one in results)
    rounds = sum(one.stats.rounds for one in results)
    return Timed(name, method, temperature, rounds / max(tokens, 1), tokens / max(seconds, 1e-9)), results


def compared(llms: dict[str, LLM], prompts: Sequence[Sequence[int]], temperature: float, new_tokens: int) -> list[Timed]:
    """Time the looped model sequentially and as a pipeline, and the other models by plain decoding."""
    looped = llms["looped"]
    sequential, expected = timed(looped, "looped", "plain", prompts, temperature, new_tokens)
    found = [sequential]
    for method in METHODS:
        one, results = timed(looped, "looped", method, prompts, temperature, new_tokens)
        same = sum(a.tokens == b.tokens for a, b in zip(results, expected, strict=True))
        found.append(Timed(**asdict(one) | {"identical": same}))
    for name in ("first repeat", "original"):
        found.append(timed(llms[name], name, "plain", prompts, temperature, new_tokens)[0])
    return [Timed(**asdict(one) | {"over_sequential": one.tokens_per_second / found[0].tokens_per_second}) for one in found]


def quality(looped: Model, original: Model, folder: Path, data: list[Path]) -> ExitFigures:
    """Return the held-out losses, on the sequences that were held out when the model was trained."""
    record = read_json(folder / "record.json", strict=False)
    settings = TrainingSettings(**record["settings"])
    _, held_out = split_data(open_data(data, Fingerprint.of(original)), record["held_out"], settings.max_length)
    return measure_exits(exits_of(looped), looped.head, original, held_out, settings, AT_ONCE)


def first_repeat(folder: Path, like: LLM, max_context: int) -> LLM:
    """Load a looped model cut after its first repeat."""
    hf = load_weights(folder, like.model.device, like.model.dtype)
    cut_after_first_repeat(hf)
    return LLM.of(Model(hf, f"{folder.name}, first repeat"), like.tokenizer, DrafterRequest.of("plain"), 1, max_context)


def speed(
    looped: Annotated[Path, typer.Argument(help="A folder that `foreword train looped` wrote.")],
    data: Annotated[list[Path], typer.Option(help="The folders of `foreword distill` that it was trained on.")],
    out: Annotated[Path, typer.Option(help="Write the figures to this JSON file.")],
    model: Annotated[str | None, typer.Option(help="The original; default: the default model.")] = None,
    prompts: Annotated[Path, typer.Option(help="A prompt file; the first turn of each is answered.")] = BUILTIN_FILE,
    per_group: Annotated[int, typer.Option(min=1, help="At most this many prompts of each category.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 128,
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    max_context: Annotated[int, typer.Option(min=2, help="The most tokens of a sequence.")] = 2048,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Time a looped model with and without its pipeline, and measure what its text lost against the original's."""
    settings: dict[str, Any] = {"slots": 1, "max_context": max_context, "device": device, "generation_config": False}
    with ExitStack() as opened:
        whole, original = (opened.enter_context(load(one, "plain", **settings)) for one in (looped, model))
        found = quality(whole.model, original.model, looped, data)
        llms = {"looped": whole, "original": original, "first repeat": first_repeat(looped, whole, max_context)}
        opened.enter_context(llms["first repeat"])
        asked = first_turns(whole, prompts, per_group)
        heat = [float(one) for one in temperatures.split(",")]
        rows = [row for temperature in heat for row in compared(llms, asked, temperature, new_tokens)]
        about = facts(whole.model.device, model=original.model.name, looped=read_json(looped / "record.json")["looped"])
        about |= {"dtype": str(whole.model.dtype).removeprefix("torch."), "prompts": len(asked), "command": command()}
    for row in rows:
        print(f"{row.model:13} {row.method:17} T={row.temperature}: {row.rounds_per_token:.3f} rounds/token, ", end="")
        print(f"{row.tokens_per_second:,.0f} tokens/s, {row.over_sequential:.2f}x")
    print(f"held-out loss {found.final:.3f}, first exit {found.first:.3f}, original {found.original:.3f}")
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"about": about, "quality": found.to_dict(), "speed": [asdict(row) for row in rows]}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(speed)
