"""`foreword bench`: methods and baselines on the same prompts, taking turns, as a table, files or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foreword.cli.console import bar, note, print_json, screen
from foreword.cli.options import Json, MethodOptions, ModelOptions
from foreword.cli.prove import NAMES_HELP, and_shipped, asked_prompts, make_folder, named_methods

if TYPE_CHECKING:
    from foreword.bench.report import Row

BENCH_EXAMPLES = """\
[bold]Examples[/]

  foreword bench

  foreword bench --prompts questions.jsonl --per-group 8 --out results/cpu --baselines hf

  foreword bench --methods prompt_lookup,clover=runs/clover,clover=runs/other

  foreword bench --methods plain,token_recycling --model ./my-model --threads 4 --json
"""


def bench(
    model: ModelOptions,
    methods: Annotated[str, typer.Option(metavar="NAMES", help=f"Methods to time{NAMES_HELP}")] = "all",
    baselines: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Others on the same weights: hf (generate of transformers), hf_lookup."),
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to answer. Default: ten that are built in.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts.")] = None,
    per_group: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most N prompts of each category of the file.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens an answer may have.")] = 128,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write results.json and report.md into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Time methods against plain decoding and against others, side by side in one run.

    Everybody answers every prompt, greedily, one text at a time, in turns, under one clock that includes the reading of
    the prompt. Speed-ups are over `plain`, which runs on the same fast path as every method. The loop share beside each
    figure says how much of the answers repeats itself, which flatters methods that look things up.
    """
    names, asked = named_methods(methods), asked_prompts(prompts, limit, per_group)
    if out is not None:
        make_folder(out)
    with model.load(MethodOptions(method="plain"), slots=1) as llm, bar("answers") as show:
        from foreword.bench import baseline, contender, run, write_report  # noqa: PLC0415  imports torch
        from foreword.bench.report import facts, tables  # noqa: PLC0415  imports torch
        from foreword.model.hub import resolve  # noqa: PLC0415  beside the others

        names = list(dict.fromkeys(["plain", *and_shipped(methods, names, llm.model)]))
        contenders = [contender(llm, name, model.max_context) for name in names]
        contenders += [baseline(name, llm, resolve(model.model)) for name in baselines.split(",") if name]
        done = run(contenders, asked, max_new_tokens, lambda count, total: show("answers", count, total))
        about = {"model": llm.model.name, "dtype": str(llm.model.dtype).removeprefix("torch."), "prompts": len(asked)}
    found = tables(done)
    if json:
        print_json({"about": facts(**about), "tables": {name: [vars(row) for row in rows] for name, rows in found.items()}})
    else:
        for name, rows in found.items():
            screen().print(_table(name, rows))
    if out is not None:
        write_report(done, out, **about)
        note(f"written: {out / 'results.json'}, {out / 'report.md'}")


def _table(name: str, rows: list[Row]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("contender")
    for head in ("tokens/s", "over plain", "tokens/round", "loop share", "same text"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.contender,
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.tokens_per_round:.2f}",
            f"{row.loop_share:.0%}",
            f"{row.identical} of {row.prompts}",
        )
    return table
