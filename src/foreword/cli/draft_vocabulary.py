"""`foreword draft-vocabulary`: choose the tokens that a trained drafter may draft, by how often its model writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, MethodOptions, ModelOptions

DRAFT_VOCABULARY_EXAMPLES = """\
[bold]Examples[/]

  foreword draft-vocabulary drafters/clover2 --data data/greedy --data data/sampled

  foreword draft-vocabulary drafters/clover2 --data data/greedy --cover 0.99

  foreword draft-vocabulary drafters/clover2 --data data/greedy --cover 1
"""


def draft_vocabulary(
    drafter: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="A trained drafter; it is changed in place.",
        ),
    ],
    model: ModelOptions,
    data: Annotated[
        list[Path], typer.Option(metavar="DIR", help="A folder that `foreword distill` wrote; may be repeated.")
    ],
    cover: Annotated[
        float,
        typer.Option(metavar="X", help="Take the most frequent tokens that cover this share of the data; 1 takes all."),
    ] = 0.98,
    json: Json = False,
) -> None:
    """Choose the draft vocabulary of a trained drafter: the tokens that it may draft.

    Drafting a token reads one row of the model's head for every token of the draft vocabulary, and most tokens are rare.
    A smaller draft vocabulary makes drafting faster and lowers acceptance a little. The output does not change. `foreword
    train` does this by itself.
    """
    from foreword.model.fingerprint import Fingerprint  # noqa: PLC0415  imports torch
    from foreword.train import choose_draft_vocabulary, open_data  # noqa: PLC0415  imports torch

    with model.load(MethodOptions(method="plain"), slots=1) as llm, waiting("counting"):
        found = choose_draft_vocabulary(drafter, llm.model, open_data(data, Fingerprint.of(llm.model)), cover)
    if json:
        return print_json(found)
    share = f"{100 * found['covered']:.2f} % of what {llm.model.name} wrote"
    screen().print(f"{drafter}: {found['count']:,} of {found['of']:,} tokens, {share}", soft_wrap=True)
