"""Where the commands write: answers on stdout, everything about them on stderr.

On a terminal there is colour (unless NO_COLOR says no); in a pipe there is the bare text, exactly as the model wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from foreword.results import Result

PIPE_WIDTH = 200  # a table in a pipe is for grep: nobody folds it


def screen() -> Console:
    """stdout. Made anew at each use, so that whoever swaps sys.stdout is heard."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def notes() -> Console:
    """stderr."""
    return Console(stderr=True, highlight=False)


def has_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def complain(about: object, kind: str = "error", style: str = "bold red") -> None:
    """An error, or a warning, on one line."""
    lines = (line.strip() for line in str(about).splitlines())
    notes().print(Text.assemble((f"{kind}: ", style), " ".join(line for line in lines if line)), soft_wrap=True)


def note(text: str) -> None:
    """A dim aside for a person; nobody reads it where stderr is not a terminal."""
    console = notes()
    if console.is_terminal:
        console.print(Text(text, "dim"), soft_wrap=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign of life on stderr while something takes seconds."""
    console = notes()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what, "dim")):
        yield


@contextmanager
def bar(what: str, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, and the function that tells it (what, how many are done, of how many)."""

    console = notes()
    columns = TextColumn("[dim]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # What goes to stdout is the answer: a bar that takes it over would send it to stderr.
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=off) as progress:
        task = progress.add_task(what, total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def end_line(text: str) -> None:
    """After a text was written: the next line begins at the left."""
    if not text.endswith("\n"):
        typer.echo()


def figures(results: list[Result], seconds: float | None = None) -> str:
    """What the answers cost, pooled; `seconds` is the time they took side by side."""
    stats = [result.stats for result in results]
    tokens = sum(one.new_tokens for one in stats)
    rounds = sum(one.rounds for one in stats)
    seconds = sum(one.decode_s for one in stats) if seconds is None else seconds
    many = len(results) > 1
    cut = not many and results[0].finish_reason == "length"
    parts = [f"{len(results)} answers"] if many else []
    parts += [
        f"{tokens} tokens" + (", all that --max-new-tokens allows" if cut else ""),
        f"{tokens / max(rounds, 1):.2f} tokens/round",
        f"{tokens / seconds if seconds else 0:.1f} tokens/s",
        results[0].method,
    ]
    return " · ".join(parts)
