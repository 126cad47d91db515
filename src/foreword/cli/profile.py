"""`foreword profile`: measure where the time of a round goes on this machine. Output: tables, a file or JSON."""

from __future__ import annotations

import json as encoder
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import note, print_json, screen, waiting
from foreword.cli.options import Json, ModelOptions, Remeasure, measuring, numbers
from foreword.cli.prove import NAMES_HELP, and_fitting, asked_prompts, named_methods
from foreword.cli.widening import Widen, WidenOldName, loaded
from foreword.errors import StorageError

if TYPE_CHECKING:
    from foreword.bench.profile import Subject

PROFILE_EXAMPLES = """\
[bold]Examples[/]

  foreword profile

  foreword profile --quick --model ./my-model --threads 4

  foreword profile --methods plain,clover=runs/clover

  foreword profile --shapes 7b --device cuda --cold --out results/profile.json
"""


class Shapes(StrEnum):
    SMALL = "135m"
    LARGE = "7b"


Candidates = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="The most rows of a verify pass in those rounds. Default: as many as pay off."),
]
Cold = Annotated[
    bool, typer.Option("--cold", metavar="", help="Also start a new process and time it up to its first token.")
]
RandomShapes = Annotated[
    Shapes | None,
    typer.Option(
        help="Use random weights of these shapes instead of a model. Nothing is fetched; the output is noise. Default: use "
        "the model."
    ),
]


def profile(
    model: ModelOptions,
    shapes: RandomShapes = None,
    rows: Annotated[str, typer.Option(metavar="N,N", help="Numbers of rows for which a pass is timed.")] = "1,4,16,64",
    contexts: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of cached tokens before those passes, up to the model's context.")
    ] = "128,512,2048",
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Methods whose rounds are timed{NAMES_HELP}")
    ] = "plain,token_recycling",
    candidates: Candidates = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size of those rounds.")] = 1,
    context: Annotated[int, typer.Option(min=2, metavar="N", help="Prompt tokens before those rounds.")] = 512,
    tokens: Annotated[int, typer.Option(min=16, metavar="N", help="New tokens per request in those rounds.")] = 96,
    widen: Widen = None,
    grow: WidenOldName = None,
    cold: Cold = False,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="Fewer sizes and fewer repeats, for a first look.")
    ] = False,
    remeasure: Remeasure = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write all figures to this JSON file. Default: no file."),
    ] = None,
    json: Json = False,
) -> None:
    """Show where the time of a round goes, on this machine and with this model.

    How fast can this machine read memory? How long does one pass take, by rows and context, and which share of the memory
    bandwidth does it reach? How long does a round take, and for how much of it does the device wait for the host? Which
    kernels make up a pass? With --cold: how long until the first token of a new process? docs/performance.md explains the
    answers. If a section fails, this is reported, the others continue, and the exit status is 1.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler writes to stderr
    names = ["plain", *named_methods("all")] if methods == "all" else named_methods(methods)
    sizes, lengths = numbers(rows, "--rows"), numbers(contexts, "--contexts")
    widen = widen or grow
    if widen and (shapes or cold):
        raise typer.BadParameter("a widened model is loaded here: leave out --shapes and --cold", param_hint="--widen")
    with measuring(remeasure), _subject(model, shapes, batch, widen, candidates) as (subject, widened):
        from foreword.bench.profile import Profile, ProfileSettings, failures  # noqa: PLC0415  imports torch
        from foreword.bench.report import facts  # noqa: PLC0415  imports torch

        names = and_fitting(methods, names, subject.model)
        settings = ProfileSettings(sizes, lengths, tuple(names), context, tokens)
        settings = settings.quick() if quick else settings
        asked = {**asdict(settings), "batch": batch, "candidates": candidates}
        about = facts(subject.model.device, model=subject.model.name, settings=asked, **widened)
        sections = Profile(subject, settings).sections
        if cold:
            sections["cold start"] = _cold(model, shapes, names[-1])
        found = _run(sections, {"about": about, "sections": {}}, out, shown=not json)
    if json:
        print_json(found)
    if out is not None:
        note(f"written: {out}")
    if failures(found["sections"]):
        raise typer.Exit(1)


@contextmanager
def _subject(
    model: ModelOptions, shapes: Shapes | None, batch: int, widen: str | None, candidates: int | None
) -> Iterator[tuple[Subject, dict[str, Any]]]:
    if shapes is None:
        with loaded(model, widen, batch, asked_prompts(None, None, None), costs=candidates is None) as (llm, widened):
            from foreword.bench.profile import Subject  # noqa: PLC0415  imports torch

            yield Subject.of(llm, candidates), widened
        return
    if model.model is not None or model.revision is not None:
        raise typer.BadParameter("random weights replace the model: leave out --model and --revision", param_hint="--shapes")
    model.refuse_quantization("a model of random weights")
    with waiting(f"making random weights of {shapes} shapes"):
        from foreword.bench.profile import random_subject  # noqa: PLC0415  imports torch

        subject = random_subject(shapes, batch, rows=candidates, **model.where())
    yield subject, {}


def _cold(model: ModelOptions, shapes: Shapes | None, method: str) -> Any:
    if shapes is not None:
        model.refuse_quantization("a model of random weights")
    from foreword.bench.cold import cold_start  # noqa: PLC0415  start-up time

    return lambda: cold_start(shapes, model.model, method, model.where())


def _run(sections: dict[str, Any], found: dict[str, Any], out: Path | None, shown: bool) -> dict[str, Any]:
    """Run the sections. Each is shown and written before the next starts, which might crash."""
    from foreword.bench.profile import attempt  # noqa: PLC0415  imports torch

    for name, section in sections.items():
        with waiting(f"measuring: {name}"):
            result = found["sections"][name] = attempt(section)
        if out is not None:
            _write(out, found)
        if shown:
            _print(name, result)
    return found


def _write(out: Path, found: dict[str, Any]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(encoder.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror}; give --out a file in a folder that can") from error


# Tables ------------------------------------------------------------------------------------------------------------------


def _print(name: str, result: Any) -> None:
    if isinstance(result, dict) and "failed" in result:
        screen().print(Text.assemble((f"{name}: ", "bold"), ("failed: ", "bold red"), result["failed"]), soft_wrap=True)
    else:
        for table in TABLES[name](result):
            screen().print(table)
            screen().print()


def _table(title: str, *heads: str, text_columns: int = 1) -> Table:
    """Make an empty table. The first `text_columns` columns hold text, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < text_columns else "right", overflow="fold")
    return table


def _machine(found: dict[str, Any]) -> list[Table]:
    table = _table("machine", "", "", text_columns=2)
    for key in ("device", "dtype", "threads", "torch", "model"):
        table.add_row(key, str(found[key]))
    table.add_row("weights", f"{found['weight_bytes'] / 1e6:.1f} MB read by a pass")
    table.add_row("peak bandwidth", f"{found['bytes_per_second'] / 1e9:.1f} GB/s, measured")
    return [table]


def _passes(found: list[dict[str, Any]]) -> list[Table]:
    heads = ("context", "rows", "ms", "over one row", "MB", "of peak bandwidth")
    table = _table("one pass, batch 1", *heads, text_columns=0)
    for one in found:
        table.add_row(str(one["context"]), str(one["rows"]), *_unless_failed(one, _pass_figures))
    return [table]


def _pass_figures(one: dict[str, Any]) -> list[str]:
    ratio = f"{one['over_one_row']:.2f}x" if "over_one_row" in one else "-"
    return [f"{one['ms']:.3f}", ratio, f"{one['bytes'] / 1e6:.1f}", _percent(one["share"])]


def _rounds(found: list[dict[str, Any]]) -> list[Table]:
    batch, context = (next((one[key] for one in found if key in one), "?") for key in ("texts", "context"))
    heads = ("method", "ms per round", "device ms", "kernels", "host share", "tokens per round", "prompt ms")
    table = _table(f"a round, batch {batch}, after {context} tokens", *heads)
    for one in found:
        table.add_row(one["method"], *_unless_failed(one, _round_figures))
    return [table]


def _round_figures(one: dict[str, Any]) -> list[str]:
    device = "-" if one["device_ms"] is None else f"{one['device_ms']:.3f}"
    kernels = "-" if one["kernels"] is None else str(len(one["kernels"]))
    figures = [f"{one['wall_ms']:.3f}", device, kernels, _percent(one["host_share"])]
    return [*figures, f"{one['tokens_per_round']:.2f}", f"{one['prefill_ms']:.2f}"]


def _parts(found: list[dict[str, Any]]) -> list[Table]:
    tables = []
    for one in found:
        title = f"where a pass goes, {one['rows']} row(s) after {one['context']} tokens"
        groups = _table(title, "part", "ms", "share", "count")
        tables.append(groups)
        if "failed" in one:
            groups.add_row(*_unless_failed(one, _pass_figures))
            continue
        wall = one["wall_ms"]
        for group, figures in one["groups"].items():
            groups.add_row(group, f"{figures['ms']:.3f}", _percent(figures["ms"] / wall), f"{figures['count']:.0f}")
        unseen = (
            "between kernels, less what overlaps" if one["device"] == "cuda" else "between the products, and not measured"
        )
        groups.add_row(unseen, f"{one['unseen_ms']:.3f}", _percent(one["unseen_ms"] / wall))
        groups.add_row("whole pass", f"{wall:.3f}")
        top = _table(f"the longest, {one['rows']} row(s)", "name", "part", "ms", "count", text_columns=2)
        for row in one["top"]:
            top.add_row(row["name"][:90], row["group"], f"{row['ms']:.3f}", f"{row['count']:.0f}")
        tables.append(top)
    return tables


def _cold_start(found: dict[str, Any]) -> list[Table]:
    table = _table("cold start", found["method"], "seconds")
    for key, label in (
        ("python_s", "Python itself"),
        ("imports_s", "imports"),
        ("load_s", "load"),
        ("first_token_s", "first token"),
        ("total_s", "all"),
    ):
        table.add_row(label, f"{found[key]:.2f}")
    return [table]


TABLES: dict[str, Any] = {
    "machine": _machine,
    "passes": _passes,
    "rounds": _rounds,
    "parts": _parts,
    "cold start": _cold_start,
}


def _unless_failed(one: dict[str, Any], figures: Any) -> list[Any]:
    return [Text(f"failed: {one['failed']}", "red")] if "failed" in one else figures(one)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
