"""`foreword try`: whether a model runs here, tried on its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json

if TYPE_CHECKING:
    from foreword.model.trial import Verdict

TRY_EXAMPLES = """\
[bold]Examples[/]

  foreword try ./my-model

  foreword try org/name --json

  foreword try ./model-of-another-family --slow
"""


def try_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|FILE|ID",
            show_default=False,
            help="A model folder, a GGUF file, a name that `foreword models` lists, or a Hugging Face id.",
        ),
    ],
    slow: Annotated[
        bool,
        typer.Option(
            "--slow", help="Try it as `--slow` of other commands runs it: by the forward pass of transformers alone."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Try whether Foreword runs a model, and say why if it does not.

    The walk over its layers scores a small tree after a cached prefix and is compared with the forward pass of transformers.
    For a model of an unknown family, it says what stands in the way, or with which line of the table of families the model
    would run. With --slow it says how transformers alone runs it here. The weights are read in float32 on the CPU. The exit
    status is 1 if the model is not supported.
    """
    verdict = _judged(model, slow)
    if json:
        print_json(_fields(verdict))
    else:
        state = "supported" if verdict.supported else "not supported"
        screen().print(f"{verdict.model_type}: {state}; {verdict.said}", soft_wrap=True, markup=False)
        if verdict.unreached_window:
            screen().print(f"a window of {verdict.unreached_window} positions is longer than what was tried", soft_wrap=True)
    if not verdict.supported:
        raise typer.Exit(1)


def _judged(model: str, slow: bool) -> Verdict:
    with waiting("starting"):
        from foreword.hub.resolve import resolve  # noqa: PLC0415  start-up time
        from foreword.model.trial import judge, judge_slow  # noqa: PLC0415  imports torch

    folder = resolve(model)  # fetching shows its own progress bar
    with waiting("trying the model"):
        return judge_slow(folder) if slow else judge(folder)


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "model_type": verdict.model_type,
        "supported": verdict.supported,
        "slow": verdict.slow,
        "said": verdict.said,
        "line": verdict.line,
        "difference": None if verdict.trial is None else verdict.trial.worst,
        "unreached_window": verdict.unreached_window or None,
    }
