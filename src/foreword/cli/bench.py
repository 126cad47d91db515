"""`foreword bench`: methods and baselines on the same prompts, taking turns, at any batch, as a table, files or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from foreword.cli.console import bar, note, print_json, screen
from foreword.cli.growing import Grow, loaded
from foreword.cli.options import Json, ModelOptions, numbers
from foreword.cli.prove import NAMES_HELP, and_shipped, asked_prompts, make_folder, named_methods

if TYPE_CHECKING:
    from foreword.bench.report import Row
    from foreword.bench.run import Benchmark
    from foreword.text import Prompt

BENCH_EXAMPLES = """\
[bold]Examples[/]

  foreword bench

  foreword bench --prompts questions.jsonl --per-group 8 --out results/cpu --baselines hf

  foreword bench --methods prompt_lookup,clover=runs/clover,clover=runs/other

  foreword bench --prompts questions.jsonl --batch 1,4,8,16,32 --grow 8 --methods clover=runs/clover

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
    batch: Annotated[str, typer.Option(metavar="N,N", help="Texts side by side; several numbers give a line each.")] = "1",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens an answer may have.")] = 128,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most so many candidates in a pass. Default: as many as pay.")
    ] = None,
    grow: Grow = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write results.json and report.md into this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Time methods against plain decoding and against others, side by side in one run.

    Everybody answers every prompt, greedily, in turns, under one clock that includes the reading of the prompt. Speed-ups
    are over `plain`, which runs on the same fast path as every method, at the same batch. The loop share beside each figure
    says how much of the answers repeats itself, which flatters methods that look things up.

    With --batch 1,8,32 it is done with that many texts at once; one that ends makes room for the next. With --grow 8 the
    model is first made 8 times as wide, and writes the same text at the cost of a larger one, which is checked.
    """
    names, asked = named_methods(methods), asked_prompts(prompts, limit, per_group)
    batches, others = numbers(batch, "--batch"), [name for name in baselines.split(",") if name]
    if others and batches != (1,):
        raise typer.BadParameter("others write one text at a time: leave out --batch", param_hint="--baselines")
    _check_filled(asked, batches)
    if out is not None:
        make_folder(out)
    with loaded(model, grow, 1, asked) as (llm, grown), bar("answers") as show:
        from foreword.bench import Contender, baseline, contender, context_for, sweep  # noqa: PLC0415  imports torch
        from foreword.model.hub import resolve  # noqa: PLC0415  beside the others

        names = list(dict.fromkeys(["plain", *and_shipped(methods, names, llm.model)]))
        context = model.max_context or context_for(llm, asked, max_new_tokens)

        def make(count: int) -> list[Contender]:
            ours = [contender(llm, name, context, count, not model.no_graph, rows=rows) for name in names]
            return ours + [baseline(name, llm, resolve(model.model)) for name in others]

        done = sweep(make, batches, asked, max_new_tokens, lambda size, *count: show(f"batch {size}", *count))
        dtype = str(llm.model.dtype).removeprefix("torch.")
    _tell(done, {"model": llm.model.name, "dtype": dtype, "prompts": len(asked), "rows": rows, **grown}, json, out)


def _check_filled(asked: list[Prompt], batches: tuple[int, ...]) -> None:
    """Before a model is loaded and grown."""
    from foreword.bench.run import check_filled  # noqa: PLC0415  imports torch

    check_filled(asked, batches)


def _tell(done: list[Benchmark], about: dict[str, Any], json: bool, out: Path | None) -> None:
    from foreword.bench.report import content, facts, write_report  # noqa: PLC0415  imports torch

    if json:
        print_json(content(done, facts(**about)))
    else:
        _print(done, about)
    if out is not None:
        write_report(done, out, **about)
        note(f"written: {out / 'results.json'}, {out / 'report.md'}")


def _print(done: list[Benchmark], about: dict[str, Any]) -> None:
    from foreword.bench.report import by_batch, grown_words, stop_words, stops_paying, tables  # noqa: PLC0415  imports torch

    if "grown" in about:
        screen().print(grown_words(about["grown"]))
    for name, rows in tables(done).items():
        screen().print(_table(name, rows))
    if [one.batch for one in done] != [1]:
        batches = by_batch(done)
        screen().print(_batch_table(batches))
        for name, stop in stops_paying(batches).items():
            if name != done[0].base:
                screen().print(stop_words(name, stop, batches))


def _batch_table(batches: dict[int, list[Row]]) -> Table:
    table = Table(title="by batch", title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for head in ("batch", *(row.contender for row in next(iter(batches.values())))):
        table.add_column(head, justify="right")
    for batch, rows in batches.items():
        table.add_row(str(batch), *(f"{row.tokens_per_second:.1f} ({row.speedup:.2f}x)" for row in rows))
    return table


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
