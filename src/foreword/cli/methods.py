"""`foreword methods`: the table of methods, read without importing one of them."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from foreword.cli.console import print_json, screen
from foreword.cli.options import Json
from foreword.methods import METHODS

METHODS_EXAMPLES = """\
[bold]Examples[/]

  foreword methods

  foreword generate "Why is the sky blue?" --method prompt_lookup
"""


def methods(json: Json = False) -> None:
    """List the methods: the ways of guessing what the model will write next.

    A trained method needs a small drafter of its own, made for the model; the others work with any model at once. The
    text is the same with each of them: `foreword prove` shows it.
    """
    if json:
        fields = {
            name: {"summary": one.summary, "trained": one.trained, "paper": one.paper} for name, one in METHODS.items()
        }
        print_json({"methods": fields})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("method", "what it does", "trained", "paper"):
        table.add_column(head, no_wrap=head == "method")
    for name, one in METHODS.items():
        table.add_row(Text(name, "bold"), one.summary, "yes" if one.trained else "no", one.paper)
    screen().print(table)
