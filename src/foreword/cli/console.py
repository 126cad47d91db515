"""Where the commands write: answers to stdout, everything about them to stderr.

On a terminal there is colour, unless NO_COLOR is set. In a pipe there is only the text, exactly as the model generated it.
On a terminal progress is a bar; elsewhere it is a plain line now and then, so that a log shows that work continues.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from foreword.results import Result

PIPE_WIDTH = 200  # wide, so that tables in a pipe are not folded and grep works


def screen() -> Console:
    """Return a console on stdout. It is made at each use, so that a replaced sys.stdout is respected."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def notes() -> Console:
    """Return a console on stderr."""
    return Console(stderr=True, highlight=False)


def has_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def complain(about: object, kind: str = "error", style: str = "bold red") -> None:
    """Print an error or a warning on one line."""
    lines = (line.strip() for line in str(about).splitlines())
    with suppress(OSError):  # a full disk of stderr ends nothing
        notes().print(Text.assemble((f"{kind}: ", style), " ".join(line for line in lines if line)), soft_wrap=True)


def note(text: str) -> None:
    """Print a dim remark for a person. Nothing is printed if stderr is not a terminal."""
    console = notes()
    if console.is_terminal:
        console.print(Text(text, "dim"), soft_wrap=True)


def note_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Note the model's own sampling defaults that no option overrides."""
    used = ", ".join(f"{name} {value}" for name, value in defaults.items() if name not in given)
    if used:
        note(f"from the model's generation_config.json: {used}")


@contextmanager
def waiting(what: str, terminal_only: bool = False) -> Iterator[None]:
    """Show on stderr that something is running. `terminal_only`: print nothing if stderr is not a terminal, for commands
    whose answer goes through a pipe."""
    console = notes()
    lines = nullcontext() if terminal_only else ProgressLines(what)
    with console.status(Text(what, "dim")) if console.is_terminal else lines:
        yield


@contextmanager
def bar(what: str, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr. Yield a function that updates it: (what, number done, total)."""
    console = notes()
    if shown and not console.is_terminal:
        with ProgressLines(what) as lines:
            yield lines.update
        return
    columns = TextColumn("[dim]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # The answer goes to stdout; a bar that redirected it would send it to stderr.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        task = progress.add_task(what, total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


class ProgressLines:
    """Progress without a terminal: a line on stderr when something takes long, and more lines now and then. A thread prints
    them, because a single step may take long."""

    FIRST_S, EVERY_S = 10.0, 30.0

    def __init__(self, what: str) -> None:
        self._what = self._line = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def update(self, what: str, done: int, total: int) -> None:
        self._line = f"{self._what}, {done} of {total}: {what}" if what != self._what else f"{what}, {done} of {total}"

    def _run(self) -> None:
        pause = self.FIRST_S
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._since
            notes().print(Text(f"{self._line} ({seconds:.0f} s)"), soft_wrap=True)
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
    """End the line after a printed text, unless it ends with a newline."""
    if not text.endswith("\n"):
        typer.echo()


def figures(results: list[Result], seconds: float | None = None) -> str:
    """Return one line of figures over all answers. `seconds`: the time they took as a batch."""
    stats = [result.stats for result in results]
    tokens = sum(one.new_tokens for one in stats)
    rounds = sum(one.rounds for one in stats)
    seconds = sum(one.decode_s for one in stats) if seconds is None else seconds
    several = len(results) > 1
    cut = not several and results[0].finish_reason == "length"
    parts = [f"{len(results)} answers"] if several else []
    parts += [
        f"{tokens} tokens" + (", the limit of --max-new-tokens" if cut else ""),
        f"{tokens / max(rounds, 1):.2f} tokens/round",
        f"{tokens / seconds if seconds else 0:.1f} tokens/s",
        results[0].method,
    ]
    return " · ".join(parts)
