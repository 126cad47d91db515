"""`foreword prove`: compare every method with plain decoding, token for token. Output: a table, files or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import bar, note, print_json, screen
from foreword.cli.options import Json, MethodOptions, ModelOptions, Slots
from foreword.drafters.spec import parse_spec, split_specs
from foreword.errors import StorageError
from foreword.methods import AUTO, all_methods, find

if TYPE_CHECKING:
    from foreword.model.model import Model
    from foreword.prove import Difference, MethodProof, Report
    from foreword.text import Prompt

PROVE_EXAMPLES = """\
[bold]Examples[/]

  foreword prove

  foreword prove --methods token_recycling --prompts questions.jsonl --per-group 5

  foreword prove --methods clover=runs/clover

  foreword prove --model ./my-model --dtype bfloat16 --temperature 1 --out proof/ --json
"""

# Questions, instructions, code, tables, other languages and loops: some are easy to draft, some are not.
PROMPTS = (
    "Why is the sky blue?",
    "Write the numbers from one to thirty in words, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Think step by step.",
    "Translate into French: The library opens at nine, and closes when the last reader has gone home.",
    "Summarise in one sentence: Bees visit flowers for nectar and pollen. As they go, pollen sticks to their fur and "
    "reaches other flowers. Many crops depend on this. Where bees vanish, harvests of fruit and nuts shrink.",
    "List five rivers of Europe as a Markdown table with the columns river, length and mouth.",
    "Write a short poem about a lighthouse that has lost its sea.",
    'Reply with JSON only: an object with the keys "name", "age" and "skills" for an imaginary engineer.',
    "Repeat after me, ten times, one per line: the quick brown fox.",
)
NAMES_HELP = (
    ", separated by commas, or `all`. NAME=FOLDER uses your trained drafter of a method, NAME:KEY=VALUE sets an option."
)
SHOWN = 10  # differences on the screen; all of them are in the files


def named_methods(given: str) -> list[str]:
    """Parse method names, separated by commas. `all`: those that need nothing; `and_fitting` adds the others."""
    table = all_methods().items()
    free = [name for name, method in table if name != "plain" and not (method.fitted or method.looped)]
    names = free if given == "all" else split_specs(given)
    for name in names:
        called = parse_spec(name).name
        if "=" in name or called == AUTO or find(called).fitted:
            from foreword.drafters.resolve import DrafterRequest  # noqa: PLC0415  imports torch

            DrafterRequest.of(name)  # checks a folder before the model is loaded
    return names


def and_fitting(given: str, names: list[str], model: Model) -> list[str]:
    """For `all`, add the methods whose shipped drafters fit this model, and those for looped models if it is one. A slow
    model runs few methods."""
    from foreword.drafters.auto import shipped_for  # noqa: PLC0415  imports torch
    from foreword.model.slow import METHODS as SLOW_METHODS  # noqa: PLC0415  imports torch

    if given != "all":
        return names
    if model.slow:
        return [name for name in names if name in SLOW_METHODS]
    return [*names, *shipped_for(model), *(name for name, one in all_methods().items() if one.looped and model.repeats > 1)]


def prove(
    model: ModelOptions,
    methods: Annotated[str, typer.Option(metavar="NAMES", help=f"Methods to test{NAMES_HELP}")] = "all",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts to test on. Default: ten built-in prompts.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N prompts. Default: all.")] = None,
    per_group: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most N prompts of each category in the file. Default: all.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The most new tokens per prompt.")] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="X",
            help="Temperature of the sampled outputs, tested in addition to greedy ones; 0 tests only greedy ones.",
        ),
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the sampled outputs.")] = 0,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most rows of a verify pass. Default: as many as pay off.")
    ] = None,
    slots: Slots = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Write proof.json and proof.md to this folder, and update them during the run. Default: no files.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that speculation changes no token: each method must produce exactly the output of plain decoding.

    Every prompt is answered greedily, and once more sampled with a fixed seed. In float32 and float64 all tokens must be
    equal. In a narrower dtype near-ties may fall either way: where outputs diverge, a float64 pass over the same sequence
    tells a tie from a bug. The exit status is 1 if there is a bug.
    """
    names, asked = named_methods(methods), asked_prompts(prompts, limit, per_group)
    if out is not None:
        make_folder(out)
    with model.load(MethodOptions(method="plain"), slots) as llm, bar("plain") as show:
        from foreword.core.sampling import Sampling  # noqa: PLC0415  imports torch
        from foreword.prove import prove as run  # noqa: PLC0415  imports torch

        samplings = [Sampling(seed=seed)] + ([Sampling(temperature=temperature, seed=seed)] if temperature else [])
        write = None if out is None else (lambda report: report.write(out))  # in case the run is interrupted
        tested = and_fitting(methods, names, llm.model)
        report = run(llm, tested, asked, samplings, max_new_tokens, rows, progress=show, on_report=write)
    if json:
        print_json(report.to_dict())
    else:
        _print(report)
    if out is not None:
        note(f"written: {', '.join(str(file) for file in report.write(out))}")
    if report.bugs:
        raise typer.Exit(1)


def asked_prompts(file: Path | None, limit: int | None, per_group: int | None) -> list[Prompt]:
    from foreword.text.prompts import NO_CATEGORY, Prompt, read_prompts, spread  # noqa: PLC0415  start-up time

    if file is None:
        prompts = [Prompt(str(number), NO_CATEGORY, [prompt]) for number, prompt in enumerate(PROMPTS, 1)]
    else:
        prompts = read_prompts(file)
    if per_group is not None:
        prompts = spread(prompts, per_group)
    return prompts[:limit]


def make_folder(out: Path) -> None:
    """Make the folder now, so that a bad path fails before the work and not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder {out} cannot be made ({error.strerror}); name another with --out") from error


def _print(report: Report) -> None:
    table = Table("method", "sampling", box=None, pad_edge=False, header_style="dim")
    for head in ("prompts", "identical", "tokens", "ties", "bugs", "tokens/round", "seconds"):
        table.add_column(head, justify="right")
    for name, proof in report.methods.items():
        for sampling, pooled in proof.samplings.items():
            table.add_row(Text(name, "bold"), sampling, *_figures(pooled))
    screen().print(table)
    differences = [(name, one) for name, proof in report.methods.items() for one in proof.differences]
    differences.sort(key=lambda pair: pair[1].verdict)  # bugs before ties
    for name, one in differences[:SHOWN]:
        screen().print(_difference(name, one), soft_wrap=True)
    if len(differences) > SHOWN:
        screen().print(f"and {len(differences) - SHOWN} more differences: --out DIR writes all of them")
    screen().print(_verdict(report))


def _figures(proof: MethodProof) -> list[Text]:
    counts = [Text(str(count)) for count in (proof.prompts, proof.identical, proof.tokens, proof.ties)]
    bugs = Text(str(proof.bugs), "bold red" if proof.bugs else "green")
    return [*counts, bugs, Text(f"{proof.tokens_per_round:.2f}"), Text(f"{proof.seconds:.1f}")]


def _difference(name: str, one: Difference) -> Text:
    style = "bold red" if one.verdict == "bug" else "yellow"
    gap = "" if one.gap is None else f", {one.gap:.2g} apart, with an error of the run of {one.error:.2g}"
    place = f"{name}, prompt {one.prompt}, {one.sampling}, new token {one.position}"
    return Text.assemble((one.verdict, style), f"  {place}: {one.plain.text!r} against {one.method.text!r}{gap}")


def _verdict(report: Report) -> Text:
    if report.bugs:
        return Text(f"{report.bugs} bugs: the output is not that of plain decoding", "bold red")
    ties = f", except for {report.ties} proven ties" if report.ties else ""
    return Text(f"no bugs: every token equals plain decoding's{ties}", "green")
