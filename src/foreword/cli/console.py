"""Where the commands write: answers on stdout, everything about them on stderr.

On a terminal there is colour (unless NO_COLOR says no); in a pipe there is the bare text, exactly as the model wrote it.
Progress is drawn on a terminal; elsewhere it is a plain line now and then, so that a log shows that something goes on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

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


def note_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """What the model itself says about sampling, where the options do not."""
    used = ", ".join(f"{name} {value}" for name, value in defaults.items() if name not in given)
    if used:
        note(f"by the model's generation_config.json: {used}")


@contextmanager
def waiting(what: str, only_here: bool = False) -> Iterator[None]:
    """A sign of life on stderr while something takes seconds. `only_here`: on a terminal alone, as for an answer that is to
    come through a pipe with nothing next to it."""
    console = notes()
    here, elsewhere = console.is_terminal, nullcontext() if only_here else Lines(what)
    with console.status(Text(what, "dim")) if here else elsewhere:
        yield


@contextmanager
def bar(what: str, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, and the function that tells it (what, how many are done, of how many)."""

    console = notes()
    if shown and not console.is_terminal:
        with Lines(what) as lines:
            yield lines.tell
        return
    columns = TextColumn("[dim]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # What goes to stdout is the answer: a bar that takes it over would send it to stderr.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        task = progress.add_task(what, total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


class Lines:
    """Progress where there is no terminal: a line on stderr when something takes long, and then now and then. A thread of
    its own writes them, for a single step may be what takes long."""

    FIRST_S, EVERY_S = 10.0, 30.0

    def __init__(self, what: str) -> None:
        self._what = self._words = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def tell(self, what: str, done: int, total: int) -> None:
        self._words = f"{self._what}, {done} of {total}: {what}" if what != self._what else f"{what}, {done} of {total}"

    def _run(self) -> None:
        pause = self.FIRST_S
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._since
            notes().print(Text(f"{self._words} ({seconds:.0f} s)"), soft_wrap=True)
            pause = self.EVERY_S

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


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
