"""`foreword methods`: the table of methods, read without importing one of them; with --measure, what `auto` makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, MethodOptions, ModelOptions
from foreword.methods import METHODS
from foreword.methods.shipped import model_of, shipped

if TYPE_CHECKING:
    from foreword.methods.auto import Expected

METHODS_EXAMPLES = """\
[bold]Examples[/]

  foreword methods

  foreword methods --measure

  foreword generate "Why is the sky blue?" --method prompt_lookup
"""


def methods(
    model: ModelOptions,
    measure: Annotated[
        bool,
        typer.Option("--measure", metavar="", help="Load the model, and say what `auto` expects of each method here."),
    ] = False,
    json: Json = False,
) -> None:
    """List the methods: the ways of guessing what the model will write next.

    A trained method needs a small drafter of its own, made for the model: one that ships, or one of yours (--drafter). The
    others work with any model at once. The text is the same with each of them: `foreword prove` shows it. With --measure a
    second table says what each is expected to bring on this machine, the fastest first: that one is what `auto` takes.
    """
    expected = _measured(model) if measure else []
    if json:
        print_json({"methods": _fields()} | ({"expected": [_figures(one) for one in expected]} if measure else {}))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("method", "what it does", "drafter", "paper"):
        table.add_column(head, no_wrap=head == "method")
    for name, one in METHODS.items():
        table.add_row(Text(name, "bold"), one.summary, _drafter(name), one.paper)
    screen().print(table)
    if measure:
        screen().print()
        screen().print(_expected_table(expected))


def _drafter(name: str) -> str:
    if not METHODS[name].trained:
        return "not needed"
    folder = shipped().get(name)
    return "to be trained" if folder is None else f"ships for {model_of(folder)}"


def _fields() -> dict[str, dict[str, Any]]:
    ships = {name: model_of(folder) for name, folder in shipped().items()}
    return {
        name: {"summary": one.summary, "trained": one.trained, "paper": one.paper, "ships_for": ships.get(name)}
        for name, one in METHODS.items()
    }


def _measured(model: ModelOptions) -> list[Expected]:
    with model.load(MethodOptions(method="plain"), slots=1) as llm, waiting("measuring what a round costs"):
        from foreword.methods.auto import expectations  # noqa: PLC0415  imports torch

        return expectations(llm.model)


def _figures(one: Expected) -> dict[str, Any]:
    return {**vars(one), "speedup": one.speedup}


def _expected_table(expected: list[Expected]) -> Table:
    table = Table(title="expected here, of one text", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.header_style = "dim"
    table.add_column("method")
    for head in ("tokens/round", "cost of a round", "over plain"):
        table.add_column(head, justify="right")
    table.add_column("tokens are from")
    for one in expected:
        figures = f"{one.tokens_per_round:.2f}", f"{one.round_cost:.2f}", f"{one.speedup:.2f}x"
        table.add_row(Text(one.method, "bold"), *figures, f"{one.source}, {one.rows} rows")
    return table
