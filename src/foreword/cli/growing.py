"""`--grow R`, for the commands that time a model: loaded, made wider, and its text compared before anything is timed."""

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

COMPARED = 4  # prompts


def _times(wanted: str | None) -> str | None:
    if wanted is not None and not re.fullmatch(r"[2-9]|[1-9]\d+|(?=.*[1-9])\d+(\.\d+)?[bB]", wanted):
        raise typer.BadParameter(f"{wanted!r} is neither a number of 2 or more, such as 8, nor a size, such as 7b")
    return wanted


Grow = Annotated[
    str | None,
    typer.Option(
        callback=_times,
        metavar="R|SIZE",
        rich_help_panel=MODEL,
        help="Make the model R times as wide (2, 4, 8, ...) without changing its function: its text at the cost of a larger "
        "one. 1b, 7b or 27b is the R that comes nearest; the default model then has 1.8, 7.0 or 27.6 B parameters.",
    ),
]


@contextmanager
def loaded(
    model: ModelOptions, times: str | None, slots: int, prompts: Sequence[Prompt], costs: bool = True
) -> Iterator[tuple[LLM, dict[str, Any]]]:
    """The model, grown if asked, decoding plainly; and what a report has to say of it. If anybody will ask for `costs`,
    that is measured now, unless it is known from a machine that was not busy: it would be part of every figure."""
    if times is None:
        with model.load(MethodOptions(method="plain"), slots) as llm:
            _know_costs(llm, costs)
            yield llm, {}
        return
    # Fetching draws a bar of its own, and two live displays would overwrite each other.
    with waiting(f"growing {model.name}: {times}") if model.is_here() else nullcontext():
        from foreword.bench.grow import load_grown  # noqa: PLC0415  imports torch

        original, grown = load_grown(model.model, times, slots=slots, **model.where())
    with grown:
        with original, waiting("comparing its text with the original's"):
            said = _compared(original, grown, prompts[:COMPARED])
        del original
        _know_costs(grown, costs)
        yield grown, said


def _know_costs(llm: LLM, asked: bool) -> None:
    from foreword.model.cost import curve_for  # noqa: PLC0415  imports torch

    if asked:
        with waiting("measuring what passes cost"):
            llm.model.curve = curve_for(llm.model, quiet=True)


def _compared(original: LLM, grown: LLM, prompts: Sequence[Prompt]) -> dict[str, Any]:
    from foreword.prove import compare  # noqa: PLC0415  imports torch

    found = compare(original, grown, prompts)
    if found.bugs:
        raise ModelError(
            f"{grown.model.name}: its text parts from the original's at {found.bugs} places that are no ties, so that its "
            "figures would mean nothing; use a wider dtype"
        )
    assert grown.model.grown is not None
    said = {name: getattr(found, name) for name in ("prompts", "tokens", "identical", "ties")}
    said |= {"times": grown.model.grown.times, "parameters": grown.model.grown.parameters}
    return {"grown": said}
