"""`--widen R`, for the commands that time a model: load it, widen it, and compare its output before anything is timed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import waiting
from foreword.cli.options import MODEL, MethodOptions, ModelOptions
from foreword.errors import ModelError

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.text import Prompt

COMPARED_PROMPTS = 4


def _checked(given: str | None) -> str | None:
    if given is not None and not re.fullmatch(r"[2-9]|[1-9]\d+|(?=.*[1-9])\d+(\.\d+)?[bB]", given):
        raise typer.BadParameter(f"{given!r} is neither a number of 2 or more, such as 8, nor a size, such as 7b")
    return given


Widen = Annotated[
    str | None,
    typer.Option(
        callback=_checked,
        metavar="R|SIZE",
        rich_help_panel=MODEL,
        help="Make the model R times as wide (2, 4, 8, ...) without changing its outputs, to time it at the cost of a "
        "larger model. A size, such as 1b, 7b or 27b, picks the nearest R; the default model then has 1.8, 7.0 or 27.6 B "
        "parameters. Default: not widened.",
    ),
]
WidenOldName = Annotated[str | None, typer.Option("--grow", callback=_checked, hidden=True)]
"""The name of `--widen` in 0.1."""


@contextmanager
def loaded(
    model: ModelOptions, times: str | None, slots: int, prompts: Sequence[Prompt], costs: bool = True
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """Load the model with plain decoding, widened if `times` is given. Also yield what a report must say about the widening.

    `costs`: a method will need the costs of passes. They are measured now, unless they are known from a machine that was not
    busy; later the measurement would be part of a figure."""
    if times is None:
        with model.load(MethodOptions(method="plain"), slots) as llm:
            _measure_costs(llm, costs)
            yield llm, {}
        return
    model.refuse_quantization("a widened model")
    # Fetching shows its own progress bar, and two live displays would overwrite each other.
    with waiting(f"widening {model.name}: {times}") if model.is_here() else nullcontext():
        from foreword.bench.widening import load_widened  # noqa: PLC0415  imports torch

        original, widened = load_widened(model.model, times, slots=slots, **model.where())
    with widened:
        with original, waiting("comparing its output with the original's"):
            facts = _compared(original, widened, prompts[:COMPARED_PROMPTS])
        del original
        _measure_costs(widened, costs)
        yield widened, facts


def _measure_costs(llm: LLM, needed: bool) -> None:
    from foreword.model.cost import curve_for  # noqa: PLC0415  imports torch

    if needed:
        with waiting("measuring what passes cost"):
            llm.model.use_costs(curve_for(llm.model, quiet=True))


def _compared(original: LLM, widened: LLM, prompts: Sequence[Prompt]) -> dict[str, Any]:
    from foreword.prove import compare  # noqa: PLC0415  imports torch

    found = compare(original, widened, prompts)
    if found.bugs:
        raise ModelError(
            f"{widened.model.name}: its output diverges from the original's at {found.bugs} positions that are not ties, "
            "so its figures would mean nothing; use a wider dtype"
        )
    assert widened.model.widened_from is not None
    facts = {name: getattr(found, name) for name in ("prompts", "tokens", "identical", "ties")}
    facts |= {"times": widened.model.widened_from.times, "parameters": widened.model.widened_from.parameters}
    return {"grown": facts}  # the name of this key in results.json
