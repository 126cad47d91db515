"""`foreword words`: which tokens a trained drafter guesses among, chosen by what its model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.console import print_json, screen, waiting
from foreword.cli.options import Json, MethodOptions, ModelOptions

WORDS_EXAMPLES = """\
[bold]Examples[/]

  foreword words drafters/clover2 --data data/greedy --data data/drawn

  foreword words drafters/clover2 --data data/greedy --cover 0.99

  foreword words drafters/clover2 --data data/greedy --cover 1
"""


def words(
    drafter: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="What `foreword train` wrote; it is changed."),
    ],
    model: ModelOptions,
    data: Annotated[
        list[Path], typer.Option(metavar="DIR", help="A folder that `foreword distill` wrote; may be repeated.")
    ],
    cover: Annotated[
        float, typer.Option(metavar="X", help="The share of what the model wrote that the words are to be; 1 takes all.")
    ] = 0.98,
    json: Json = False,
) -> None:
    """Choose the tokens that a trained drafter guesses among: the most frequent ones.

    A guess reads a row of the model's head for every token that it chooses from, and most tokens are rare. With fewer of
    them guessing is quicker, and a little less often right; the text does not change. `foreword train` does this by itself.
    """
    from foreword.model.fingerprint import Fingerprint  # noqa: PLC0415  imports torch
    from foreword.train import give_words, open_data  # noqa: PLC0415  imports torch

    with model.load(MethodOptions(method="plain"), slots=1) as llm, waiting("counting"):
        told = give_words(drafter, llm.model, open_data(data, Fingerprint.of(llm.model)), cover)
    if json:
        return print_json(told)
    share = f"{100 * told['covered']:.2f} % of what {llm.model.name} wrote"
    screen().print(f"{drafter}: {told['count']:,} of {told['of']:,} tokens, {share}", soft_wrap=True)
