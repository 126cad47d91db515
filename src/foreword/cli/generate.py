"""`foreword generate`: answer a prompt or a file of prompts, as text or JSON.

One answer is streamed. Several run as a batch and are printed in order, each exactly as `LLM.generate` would give it with
the same seed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from foreword.cli.console import bar, end_line, figures, note, note_defaults, print_json, screen
from foreword.cli.options import (
    GENERATION,
    GenerationOptions,
    Json,
    MethodOptions,
    ModelOptions,
    Prediction,
    Remeasure,
    Slots,
    Tp,
    text_of,
)
from foreword.errors import PromptError

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.results import Result

GENERATE_EXAMPLES = """\
[bold]Examples[/]

  foreword generate "Why is the sky blue?"

  cat letter.txt | foreword generate - --temperature 0.7 --seed 1

  foreword generate "def fibonacci(n):" --raw --method prompt_lookup --max-new-tokens 64

  foreword generate "Why is the sky blue?" --drafter runs/clover

  foreword generate "Rename x to y: $(cat code.py)" --prediction code.py --method prompt_lookup

  foreword generate --prompts questions.jsonl --limit 20 --json > answers.jsonl
"""


def generate(
    model: ModelOptions,
    method: MethodOptions,
    generation: GenerationOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt to answer. `-`, or no prompt in a pipe, reads standard input."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer every prompt of a file: one per line, or JSON lines with prompt, turns, messages or conversations "
            "(the first of several turns). With --json the answers are JSON lines, in order, each with its id. "
            "Default: answer PROMPT.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts of the file. Default: all.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, metavar="N", help="Samples per prompt; they differ above temperature 0.")] = 1,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", metavar="", help="Continue the prompt itself, without the chat template.", rich_help_panel=GENERATION
        ),
    ] = False,
    prediction: Prediction = None,
    slots: Slots = 4,
    tp: Tp = None,
    remeasure: Remeasure = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every round to a file, one JSON object per line; `foreword draw` draws them. Default: none.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Answer a prompt, and stream the answer.

    The model answers as in a chat; with --raw it continues the prompt. On a terminal a last line shows tokens per round
    (plain decoding has 1) and the speed.
    """
    settings = generation.settings(json) | {"chat": not raw}
    if prediction is not None:
        settings["prediction"] = text_of(prediction, "--prediction")
    asked = _prompts(prompt, prompts, limit)
    own = not generation.no_generation_config
    with model.load(method, slots if len(asked) * n > 1 else 1, remeasure, generation_config=own, tp=tp) as llm:
        note_defaults(llm.sampling_defaults, settings)
        if trace is not None:
            llm.trace(trace)
        if len(asked) * n > 1 or prompts:
            _print_all(llm, asked, n, json, settings)
        elif json:
            print_json(llm.stream(asked[0][1], **settings).result.to_dict())
        else:
            _print_one(llm, asked[0][1], settings)


def _prompts(prompt: str | None, file: Path | None, limit: int | None) -> list[tuple[str | None, Any]]:
    """Return the prompts, each with its id in the file."""
    if file is not None:
        from foreword.text import read_prompts  # noqa: PLC0415  start-up time

        if prompt is not None:
            raise typer.BadParameter("give a prompt or --prompts FILE, not both")
        rows = read_prompts(file, limit)
        return [(row.id, row.first()) for row in rows]
    if limit is not None:
        raise typer.BadParameter("it limits the prompts of a file: add --prompts FILE", param_hint="--limit")
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, pipe one in, or name a file with --prompts")
    return [(None, _standard_input() if prompt in (None, "-") else prompt)]


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 ({error.reason}); convert it") from error


def _print_one(llm: LLM, prompt: Any, settings: dict[str, Any]) -> None:
    stream = llm.stream(prompt, **settings)
    for piece in stream:
        typer.echo(piece, nl=False)
    end_line(stream.result.text)
    note(figures([stream.result]))


def _print_all(llm: LLM, asked: list[tuple[str | None, Any]], n: int, json: bool, settings: dict[str, Any]) -> None:
    labels = (
        ({} if name is None else {"id": name}) | ({} if n == 1 else {"sample": i}) for name, _ in asked for i in range(n)
    )
    started = time.perf_counter()
    done: list[Result] = []
    results = llm.generate_each([prompt for _, prompt in asked], n=n, **settings)
    with bar("answers", shown=not screen().is_terminal) as show:  # on a terminal the answers themselves show progress
        show("answers", 0, len(asked) * n)
        for label, result in zip(labels, results, strict=True):
            if json:
                print_json(label | result.to_dict())
            else:
                _print_answer(" ".join(f"{key} {value}" for key, value in label.items()), result)
            done.append(result)
            show("answers", len(done), len(asked) * n)
    note(figures(done, time.perf_counter() - started))


def _print_answer(label: str, result: Result) -> None:
    console = screen()
    if console.is_terminal:
        console.rule(Text(label), style="dim", align="left")
    typer.echo(result.text, nl=False)
    end_line(result.text)
    if not console.is_terminal:
        typer.echo()
