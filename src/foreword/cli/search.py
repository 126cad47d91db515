"""`foreword search`: find the half-layers that a model can leave out while it drafts for itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import bar, note, print_json, screen
from foreword.cli.options import Json, MethodOptions, ModelOptions
from foreword.cli.prove import make_folder
from foreword.errors import DrafterError
from foreword.methods import all_methods, find

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.train.skip_search import SearchSettings

SEARCH_EXAMPLES = """\
[bold]Examples[/]

  foreword search self_speculative --data data/greedy --out plans/default

  foreword search self_speculative --model ./my-model --data data/greedy --out plans/my-model --windows 256

  foreword generate "Why is the sky blue?" --drafter plans/default
"""


def _searched(method: str) -> str:
    if not find(method).searched:
        known = ", ".join(name for name, one in all_methods().items() if one.searched)
        raise DrafterError(f"{method} has no plan to search; these have: {known}")
    return method


def search(
    method: Annotated[
        str,
        typer.Argument(
            callback=_searched,
            autocompletion=lambda: [name for name, one in all_methods().items() if one.searched],
            metavar="METHOD",
            help="The method whose plan is searched: self_speculative.",
        ),
    ],
    model: ModelOptions,
    data: Annotated[
        list[Path], typer.Option(metavar="DIR", help="A folder that `foreword distill` wrote; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Write the plan to this folder.")],
    windows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Judge a plan on parts of N sequences; more are slower and surer.")
    ] = 64,
    length: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of such a part, and of the longest draft.")] = 12,
    patience: Annotated[
        int, typer.Option(min=1, metavar="N", help="Stop after N further half-layers without a faster plan.")
    ] = 8,
    json: Json = False,
) -> None:
    """Search the half-layers that a model leaves out while it drafts for itself.

    A half-layer is the attention or the MLP of a layer. Each step leaves out one more: the one without which drafting is
    expected to be fastest. The expectation comes from two measurements: how often the shortened model predicts the token
    that the whole model predicts, on sequences that the model wrote; and what passes and half-layers cost on this machine.
    No weights are trained.

    The folder holds the best plan so far at any time; --drafter takes it. The same command resumes an interrupted search.
    """
    from foreword.train.skip_search import SearchSettings  # noqa: PLC0415  imports torch

    settings = SearchSettings(windows=windows, length=length, patience=patience)
    make_folder(out)
    with model.load(MethodOptions(method="plain"), slots=1) as llm:
        record = _run(llm, data, out, settings)
    if json:
        return print_json(record)
    screen().print(_summary(record, out), soft_wrap=True)


def _run(llm: LLM, folders: list[Path], out: Path, settings: SearchSettings) -> dict[str, Any]:
    from foreword.bench.report import facts  # noqa: PLC0415  imports torch
    from foreword.model.fingerprint import Fingerprint  # noqa: PLC0415  imports torch
    from foreword.train import all_sequences, describe_data, open_data  # noqa: PLC0415  imports torch
    from foreword.train.skip_search import SkipSearch  # noqa: PLC0415  imports torch

    data = open_data(folders, Fingerprint.of(llm.model))
    about = describe_data(data)
    run = facts(dtype=str(llm.model.dtype).removeprefix("torch."))
    with bar("searching") as show:
        try:
            found = SkipSearch(llm.model, all_sequences(data), settings, out, show)
            return found.run([one["sha256"] for one in about], {"data": about, "run": run})
        except KeyboardInterrupt:
            note(f"stopped; the same command continues the search in {out}")
            raise


def _summary(record: dict[str, Any], out: Path) -> str:
    best, layers = record["best"], record["layers"]
    needed = best["break_even"]
    parts = [
        f"{len(best['attention'])} attention and {len(best['mlp'])} MLP halves of {layers} layers left out",
        f"agreement {best['agreement']:.3f}",
        f"a draft token costs {best['draft_cost']:.2f} of a pass",
        f"{best['expected_speedup']:.2f}x of plain expected, with {best['draft_tokens']} draft tokens",
        "at no agreement faster" if needed is None else f"it pays off from an agreement of {needed:.3f} on",
    ]
    return f"{out}: " + " · ".join(parts)
