"""`foreword draw`: the command. It reads one round of a trace, and `cli/picture.py` draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foreword.cli.picture import Picture
from foreword.errors import InputError, StorageError
from foreword.files import lines_of, parse_json

LONGEST_LINE = 1 << 24  # bytes; a round of a thousand rows takes a few hundred thousand
DRAW_EXAMPLES = """\
[bold]Examples[/]

  foreword generate "Why is the sky blue?" --method gsd --trace rounds.jsonl

  foreword draw rounds.jsonl --round 4 --out round.svg
"""


def draw(
    trace: Annotated[Path, typer.Argument(metavar="FILE", help="A trace that `foreword generate --trace FILE` wrote.")],
    round: Annotated[int, typer.Option(min=0, metavar="N", help="The round of the request, counted from 0.")] = 0,
    text: Annotated[int, typer.Option(min=0, metavar="N", help="The request of the trace, counted from 0.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the picture to this file. Default: standard output.")
    ] = None,
) -> None:
    """Draw one round of a trace as an SVG picture.

    Accepted draft tokens are green. The token that the model chose itself, which ends every round, is a blue pill. Draft
    tokens that were not verified are dotted. For gsd it shows the draft graph: a dashed line is an alias, a continuation
    that occurred before and was not drafted again; figures are probabilities of the draft model. The sign ␣ is a space. The
    picture follows the light or dark theme of the program that shows it.
    """
    line = _line(trace, text, round)
    try:
        checked, decided = _counted(len(line["nodes"]), "row"), _counted(len(line["accepted"]), "token")
        svg = Picture.of(line).svg(f"sequence {text}, round {round}: {checked} checked, {decided} decided")
    except (ValueError, LookupError, TypeError) as error:
        raise _not_a_trace(trace, error) from error
    if out is None:
        typer.echo(svg, nl=False)
        return
    try:
        out.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{out} cannot be written ({error}); name another file") from error


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _line(trace: Path, text: int, round: int) -> dict[str, Any]:
    try:
        with trace.open("rb") as stream:
            lines = [parse_json(line) for line in lines_of(stream, LONGEST_LINE)]
        found = {(line["text"], line["round"]): line for line in lines}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _not_a_trace(trace, error) from error
    if (text, round) not in found:
        last = max((number for request, number in found if request == text), default=None)
        requests = len({request for request, _ in found})
        has = f"it has {requests} requests" if last is None else f"that request has rounds 0 to {last}"
        raise InputError(f"{trace} has no round {round} of request {text}; {has}")
    return found[text, round]


def _not_a_trace(trace: Path, error: Exception) -> InputError:
    return InputError(f"{trace} is not a trace ({error!r}); `foreword generate --trace FILE` writes one")
