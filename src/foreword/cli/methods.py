"""`foreword methods`: list the methods without importing them; with --measure, also what `auto` would pick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import complain, print_json, screen, waiting
from foreword.cli.options import Json, MethodOptions, ModelOptions, Remeasure, measuring
from foreword.drafters.shipped import model_of, shipped
from foreword.methods import all_methods, find

if TYPE_CHECKING:
    from foreword.drafters.auto import Choice, Expected

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
        typer.Option(
            "--measure",
            metavar="",
            help="Load the model, and show the speed-up that `auto` expects of each method on this machine.",
        ),
    ] = False,
    remeasure: Remeasure = False,
    json: Json = False,
) -> None:
    """List the methods: the ways to draft the next tokens of the model.

    A trained method needs a drafter made for the model: one that ships, or one of yours (--drafter). A method that must be
    searched for needs a plan for the model, which `foreword search` finds. `speed` needs a looped model, which `foreword
    train looped` makes. The others work with any model at once. The output is the same with every method; `foreword prove`
    shows it. With --measure a second table shows the expected speed-up on this machine, the fastest first, and which method
    `auto` picks: the fastest, or its earlier choice if that is about as fast. --remeasure measures the costs again first.
    """
    found = _measured(model, remeasure) if measure or remeasure else None
    if json:
        print_json({"methods": _fields()} | ({} if found is None else _expected_fields(*found)))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("method", "what it does", "drafter", "paper"):
        table.add_column(head, no_wrap=head == "method")
    for name, one in all_methods().items():
        table.add_row(Text(name, "bold"), one.summary, _drafter(name), one.paper)
    screen().print(table)
    if found is not None:
        expected, chosen = found
        screen().print()
        screen().print(_expected_table(expected))
        screen().print(f"auto picks {chosen.method}")
        if not all(one.steady for one in expected):
            complain("costs were measured while the machine was busy; try --remeasure when it is quiet", "warning", "yellow")


def _drafter(name: str) -> str:
    if find(name).looped:
        return "needs a looped model"
    if not find(name).fitted:
        return "not needed"
    folder = shipped().get(name)
    if folder is None:
        return "must be trained" if find(name).trained else "must be searched for"
    return f"ships for {model_of(folder)}"


def _fields() -> dict[str, dict[str, Any]]:
    ships = {name: model_of(folder) for name, folder in shipped().items()}
    return {
        name: {"summary": one.summary, "trained": one.trained, "paper": one.paper, "ships_for": ships.get(name)}
        for name, one in all_methods().items()
    }


def _measured(model: ModelOptions, remeasure: bool) -> tuple[list[Expected], Choice]:
    with measuring(remeasure), model.load(MethodOptions(method="plain"), slots=1) as llm:
        from foreword.drafters.auto import choose, expectations  # noqa: PLC0415  imports torch

        with waiting("measuring what a round costs"):
            expected = expectations(llm.model)
        return expected, choose(llm.model, expected)


def _expected_fields(expected: list[Expected], chosen: Choice) -> dict[str, Any]:
    return {"expected": [{**vars(one), "speedup": one.speedup} for one in expected], "auto": chosen.method}


def _expected_table(expected: list[Expected]) -> Table:
    table = Table(
        title="expected on this machine, batch 1", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.header_style = "dim"
    table.add_column("method")
    for head in ("tokens/round", "cost of a round", "over plain"):
        table.add_column(head, justify="right")
    table.add_column("tokens/round from")
    for one in expected:
        figures = f"{one.tokens_per_round:.2f}", f"{one.round_cost:.2f}", f"{one.speedup:.2f}x"
        table.add_row(Text(one.method, "bold"), *figures, f"{one.source}, {one.rows} rows")
    return table
