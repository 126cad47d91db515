"""`foreword distill`: let the model answer a prompt file, and store its answers as training data."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import bar, complain, note, print_json, screen
from foreword.cli.options import GENERATION, Json, MethodOptions, ModelOptions

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.text import Prompt
    from foreword.train import DistillProgress, Recipe

DISTILL_EXAMPLES = """\
[bold]Examples[/]

  foreword distill --prompts prompts.jsonl.xz --out data/greedy

  foreword distill --prompts prompts.jsonl.xz --out data/mixed --temperature 0.8 --answers 4 --drop-loops 0.3

  foreword distill --prompts questions.txt --out data/try --limit 100 --max-new-tokens 64 --slots 8
"""
SLOTS = {"cpu": 16, "cuda": 512}


_of_generation = partial(typer.Option, rich_help_panel=GENERATION)


@dataclass(frozen=True)
class RecipeOptions:
    """Everything that decides which tokens are generated and kept."""

    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Stop once the model has written N tokens that were kept. Default: answer all prompts."
        ),
    ] = None
    answers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Answers per prompt; they differ above temperature 0.")
    ] = 1
    drop_loops: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="Drop answers of which more than this share repeats itself; 0.3 is mild. Default: keep all.",
        ),
    ] = None
    max_new_tokens: Annotated[int, _of_generation(min=1, metavar="N", help="The most tokens per answer.")] = 512
    temperature: Annotated[
        float, _of_generation(min=0, metavar="X", help="Randomness: 0 always takes the likeliest token.")
    ] = 0.0
    top_p: Annotated[
        float,
        _of_generation(
            min=0, max=1, metavar="X", help="Sample from the likeliest tokens that together have this probability; 1 is off."
        ),
    ] = 1.0
    seed: Annotated[
        int, _of_generation(metavar="N", help="Each prompt is sampled with a seed made from this one and its id.")
    ] = 0

    def recipe(self) -> Recipe:
        from foreword.train import Recipe  # noqa: PLC0415  imports torch

        return Recipe(**vars(self))


def distill(
    model: ModelOptions,
    recipe: RecipeOptions,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The prompts: one per line, or JSON lines with prompt, turns, messages or conversations; also .gz and .xz; "
            "`-` reads standard input.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Write the training data to this folder.")],
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts. Default: all.")] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Batch size; the cache grows with it. Default: 512 on a GPU, else 16."),
    ] = None,
    json: Json = False,
) -> None:
    """Let the model answer a prompt file in large batches, and store its answers as training data.

    A drafter learns to draft what this model writes, so the model's own output is the best training data. Every turn of a
    prompt is answered after the earlier turns and the model's own replies to them.

    The same command resumes an interrupted run; at most a few seconds of work are lost. Prompts that cannot be used
    (malformed rows, or too long for --max-context with room for an answer) are skipped and counted. The folder holds
    shards of token ids with a mask of what the model wrote, and manifest.json: docs/train.md has the format.
    """
    left_out: list[str] = []
    checked = recipe.recipe()
    asked = _prompts(prompts, limit, left_out)
    with model.load(MethodOptions(method="plain"), slots or SLOTS[_device(model)]) as llm:
        done = _run(llm, asked, out, checked)
    if json:
        print_json(_facts(done, out, left_out))
    else:
        screen().print(_summary(done, out, len(left_out)), soft_wrap=True)
    if left_out:
        complain(f"{len(left_out)} rows of {prompts} cannot be used; the first: {left_out[0]}", "warning", "yellow")


def _prompts(file: Path, limit: int | None, left_out: list[str]) -> list[Prompt]:
    from foreword.text import read_prompts  # noqa: PLC0415  start-up time

    return read_prompts(file, limit, left_out)


def _device(model: ModelOptions) -> str:
    from foreword.model.loading import choose_device  # noqa: PLC0415  imports torch

    return choose_device(model.device).type


def _run(llm: LLM, asked: list[Prompt], out: Path, recipe: Recipe) -> DistillProgress:
    from foreword.train import distill as run  # noqa: PLC0415  imports torch

    with bar("prompts") as show:

        def report(progress: DistillProgress) -> None:
            loops = f", {progress.counts['loops']} loops dropped" if recipe.drop_loops is not None else ""
            what = f"{progress.tokens:,} tokens, {progress.tokens_per_second:,.0f}/s{loops}"
            show(what, progress.done, progress.dialogues)

        try:
            return run(llm, asked, out, recipe, command=shlex.join(["foreword", *sys.argv[1:]]), show=report)
        except KeyboardInterrupt:
            note(f"stopped; {out} can be used as it is, and the same command continues")
            raise


def _facts(done: DistillProgress, out: Path, left_out: list[str]) -> dict[str, Any]:
    return {
        "out": str(out),
        "talks": done.dialogues,
        "done": done.done,
        **{name: done.counts[name] for name in ("sequences", "tokens", "written", "answers", "loops")},
        "skipped": done.skipped,
        "unusable_rows": len(left_out),
        "seconds": done.seconds,
        "tokens_per_second": done.tokens_per_second,
    }


def _summary(done: DistillProgress, out: Path, unusable: int) -> str:
    counts = done.counts
    parts = [
        f"{counts['written']:,} tokens written by the model, in {counts['sequences']:,} sequences of {counts['tokens']:,}",
        f"{done.tokens_per_second:,.0f} tokens/s" if done.written_now else "nothing was left to do",
    ]
    parts += [f"{counts['loops']} loops dropped"] if counts["loops"] else []
    parts += [f"{count} {reason}" for reason, count in done.skipped.items()]
    parts += [f"{unusable} rows that cannot be used"] if unusable else []
    return f"{out}: " + " · ".join(parts)
