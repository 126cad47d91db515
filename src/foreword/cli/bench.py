"""`foreword bench`: time methods and baselines on the same prompts, interleaved. Output: tables, files or JSON.

`compare` and `table` read those files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from foreword.cli.console import bar, complain, note, print_json, screen, waiting
from foreword.cli.options import Json, ModelOptions, Remeasure, measuring, numbers
from foreword.cli.prove import NAMES_HELP, and_fitting, make_folder, named_methods
from foreword.cli.widening import Widen, WidenOldName, loaded
from foreword.drafters.spec import parse_spec
from foreword.errors import ForewordError, InputError, StorageError
from foreword.methods import AUTO, all_methods

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.bench import Benchmark, BlockRun, Contender, Plan
    from foreword.bench.compare import Change
    from foreword.bench.journal import Journal
    from foreword.bench.report import Extras
    from foreword.bench.run import RunResults

BENCH_EXAMPLES = """\
[bold]Examples[/]

  foreword bench --quick

  foreword bench --prompts spec_bench_48=question.jsonl --baselines hf,hf_lookup --out results/cpu

  foreword bench --prompts questions.jsonl --prompts code=humaneval.jsonl.gz --per-group 8 --temperature 0,0.8

  foreword bench --methods prompt_lookup --drafter clover=runs/clover --batch 1,4,16,32 --widen 7b

  foreword bench compare results/before results/after
"""
COMPARE_EXAMPLES = """\
[bold]Examples[/]

  foreword bench compare results/before results/after

  foreword bench compare results/before results/after --json
"""
TABLE_EXAMPLES = """\
[bold]Examples[/]

  foreword bench table results/cpu

  foreword bench table results/cuda --batch 8 --temperature 0.8

  foreword bench table --into README.md
"""
METHODS_HELP = f"Methods to time{NAMES_HELP} On a single GPU `all` leaves out amusd, which would slow the others down."
QUICK_PER_GROUP, QUICK_TOKENS = 1, 48
WORKLOAD = "Workload"  # a panel of --help
_of_workload = partial(typer.Option, rich_help_panel=WORKLOAD)


@dataclass(frozen=True)
class WorkloadOptions:
    """Which prompts every contender answers, how often and in which batches."""

    prompts: Annotated[
        list[str] | None,
        _of_workload(
            metavar="[NAME=]FILE",
            help="Prompts to answer; may be repeated. spec_bench_48=FILE and spec_bench_240=FILE are samples of Spec-Bench "
            "(its questions), spec_bench_48b=FILE a sample that nothing was tuned on. Default: sixty built-in prompts.",
        ),
    ] = None
    limit: Annotated[
        int | None, _of_workload(min=1, metavar="N", help="Only the first N prompts of each file. Default: all.")
    ] = None
    per_group: Annotated[
        int | None, _of_workload(min=1, metavar="N", help="At most N prompts of each category of a file. Default: all.")
    ] = None
    batch: Annotated[str, _of_workload(metavar="N,N", help="Batch sizes; each gets its own table.")] = "1"
    temperature: Annotated[
        str, _of_workload(metavar="X,X", help="Temperatures; 0 is greedy. Sampled outputs are the same for all methods.")
    ] = "0"
    repeats: Annotated[
        int, _of_workload(min=1, metavar="N", help="Repeat everything N times, and take the median time of each prompt.")
    ] = 3
    max_new_tokens: Annotated[int, _of_workload(min=1, metavar="N", help="The most tokens per answer.")] = 128
    rows: Annotated[
        int | None, _of_workload(min=1, metavar="N", help="The most rows of a verify pass. Default: as many as pay off.")
    ] = None
    quick: Annotated[
        bool,
        _of_workload("--quick", metavar="", help="One prompt per category, 48 tokens, no repeats: a few minutes on a CPU."),
    ] = False
    remeasure: Remeasure = False

    def plan(self) -> Plan:
        """Return the checked plan, before a model is loaded."""
        from foreword.bench import Plan, read_suites  # noqa: PLC0415  imports torch

        per_group, tokens, repeats = self.per_group, self.max_new_tokens, self.repeats
        if self.quick:
            per_group, tokens, repeats = min(per_group or QUICK_PER_GROUP, QUICK_PER_GROUP), min(tokens, QUICK_TOKENS), 1
        batches, temperatures = numbers(self.batch, "--batch"), _temperatures(self.temperature)
        plan = Plan(read_suites(self.prompts or [], self.limit, per_group), tokens, batches, temperatures, repeats)
        plan.check()
        return plan


Baselines = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="Other decoders in the same run, at batch 1: hf (generate of transformers), hf_static (static cache, compiled; "
        "on a GPU), hf_lookup, hf_assistant (with the shipped draft model) or hf_assistant=FOLDER, llama_cpp=FILE.gguf. "
        "Default: none.",
    ),
]


@dataclass(frozen=True)
class BenchOptions:
    """The arguments of the command, checked before a model is loaded."""

    methods: str
    names: list[str]
    baselines: list[str]
    plan: Plan
    rows: int | None
    kept: bool  # whether JSON or files are written, and not only tables on the screen
    excluded: tuple[str, ...] = ()  # methods of `all` that need a run of their own


def bench(
    ctx: typer.Context,
    model: ModelOptions,
    workload: WorkloadOptions,
    methods: Annotated[str, typer.Option(metavar="NAMES", help=METHODS_HELP)] = "all",
    drafter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="Also time this trained drafter; may be repeated. Default: none."),
    ] = None,
    baselines: Baselines = "",
    widen: Widen = None,
    grow: WidenOldName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Write results.json, report.md, report.html and the answers to this folder. The same command resumes a "
            "run. Default: no files.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time methods against plain decoding and against other decoders, interleaved in one run.

    Every contender answers every turn of every prompt. Times include reading the prompt. Speed-ups are over `plain`, which
    runs on the same engine at the same batch size. A method whose output differs from plain's gets no speed-up, unless the
    difference is a near-tie of the model. The loop share next to each figure is the share of the answers that repeats
    itself, which favours methods that look tokens up.

    With --batch 1,8,32 it runs with these batch sizes. A request that ends makes room for the next.
    """
    if ctx.invoked_subcommand is not None:
        return
    names = [*named_methods(methods), *(name for one in drafter or () for name in named_methods(one))]
    plan = workload.plan()
    asked = BenchOptions(methods, names, _baselines(baselines, plan), plan, workload.rows, json or out is not None)
    if out is not None:
        make_folder(out)
    costs = workload.rows is None and names != ["plain"]
    with measuring(workload.remeasure), loaded(model, widen or grow, 1, plan.prompts, costs) as (llm, widened):
        asked = _named(asked, llm)
        journal = _journal(asked, model, llm, out)
        found, timings, answers = _measured(asked, model, llm, widened, journal)
    if json:
        print_json(found)
    else:
        _print(found)
    if out is not None:
        from foreword.bench import write_report  # noqa: PLC0415  imports torch

        files = write_report(found, timings, out, answers)
        journal.end()
        note(f"written: {', '.join(map(str, files))}")


def _named(asked: BenchOptions, llm: LLM) -> BenchOptions:
    """Fill in what `all` means for this model on this machine."""
    from torch.cuda import device_count  # noqa: PLC0415  slow

    from foreword.bench.contenders import needs_own_run  # noqa: PLC0415  imports torch

    added = and_fitting(asked.methods, [], llm.model)
    left = needs_own_run(added, llm.model.device, device_count())
    names = dict.fromkeys(["plain", *asked.names, *(name for name in added if name not in left)])
    given = {parse_spec(name).name for name in names}
    return replace(asked, names=list(names), excluded=tuple(name for name in left if name not in given))


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(number) for number in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= one < math.inf for one in found) or len(set(found)) < len(found):
        raise typer.BadParameter(f"{text!r} is not a list of temperatures, such as 0,0.8", param_hint="--temperature")
    return found


def _baselines(names: str, plan: Plan) -> list[str]:
    from foreword.bench import check_baseline  # noqa: PLC0415  imports torch

    found = [check_baseline(one.strip()) for one in names.split(",") if one.strip()]
    if found and (1 not in plan.batches or 0 not in plan.temperatures):
        raise typer.BadParameter(
            "baselines run greedily at batch 1: include 1 in --batch and 0 in --temperature",
            param_hint="--baselines",
        )
    return found


def _measured(
    asked: BenchOptions, model: ModelOptions, llm: LLM, widened: dict[str, Any], journal: Journal
) -> tuple[dict[str, Any], Any, Any]:
    """Run the benchmark; return the figures, the single timings, and the answers in Spec-Bench's form."""
    from foreword import bench as room  # noqa: PLC0415  imports torch
    from foreword.bench.report import facts  # noqa: PLC0415  as above
    from foreword.bench.spec_bench import answer_records  # noqa: PLC0415  as above
    from foreword.cli.judging import referee  # noqa: PLC0415  as above
    from foreword.hub.resolve import resolve  # noqa: PLC0415  as above
    from foreword.model.busy import Waits, busy_message  # noqa: PLC0415  as above

    plan, folder = asked.plan, resolve(model.model, model.revision)
    before, others = _drift_check(model, llm), _others_at_work()
    with bar("answers") as show:
        with Waits() as waits:
            found = room.run(
                lambda count: _contenders(asked, model, llm, folder, count),
                plan,
                llm.tokenizer,
                journal.block_runs,
                journal.add,
                show,
            )
        drift = {"before": before, "after": _drift_check(model, llm)} if before else {}
        block_runs = sorted(found.block_runs.values(), key=lambda block_run: _order(block_run.place, plan))
        settings = room.GenerationSettings(plan.max_new_tokens, seed=plan.seed)
        verdicts = room.Verdicts(block_runs, settings, referee(llm, folder, show))
    timings = room.timings(block_runs, verdicts)
    made = room.benchmarks(timings, plan.max_new_tokens, found.warm_up_s)
    answers = answer_records(block_runs, plan.prompts, llm.tokenizer.decode)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    about = facts(llm.model.device, model=llm.model.name, dtype=dtype, prompts=len(plan.prompts), rows=asked.rows, **widened)
    about |= {"prompts_sha256": plan.prompts_sha256, "resumed": len(journal.block_runs)}
    busy = {"others": others, "waited": waits.share, "told": busy_message(others, waits.share)}
    measured = {
        "roofline": _roofline(asked, llm, made, block_runs),
        "costs": journal.costs or {},
        "drift_check": drift,
        "busy": busy,
    }
    return room.content(made, about, timings, _extras(asked, llm, found, answers, measured)), timings, answers


def _others_at_work() -> float:
    """Return the share of the cores that other programs use, and warn if it would spoil the figures."""
    from foreword.model.busy import busy_message, others_at_work  # noqa: PLC0415  imports torch

    share = others_at_work()
    if message := busy_message(share):
        complain(f"{message}, so these figures will be noisy; close other programs, or wait", "warning", "yellow")
    return share


def _drift_check(model: ModelOptions, llm: LLM) -> dict[Any, Any]:
    """Time a few passes now, to be compared later: the clock drift check. Empty where no graphs are captured."""
    from foreword.bench.passes import drift_check  # noqa: PLC0415  imports torch
    from foreword.bench.profile import attempt  # noqa: PLC0415  as above

    found: dict[Any, Any] = {} if model.no_cuda_graphs else attempt(lambda: drift_check(llm.model))
    return found


def _order(place: Any, plan: Plan) -> tuple[int, ...]:
    first = plan.batches.index(place.batch), plan.temperatures.index(place.temperature)
    return (*first, place.repeat, place.turn, place.block)


def _roofline(asked: BenchOptions, llm: LLM, made: Sequence[Benchmark], block_runs: Sequence[BlockRun]) -> dict[str, Any]:
    """Return the roofline of the methods at batch 1; empty if that was not timed or is not written anywhere."""
    from foreword.bench.profile import attempt  # noqa: PLC0415  imports torch
    from foreword.bench.roofline import roofline  # noqa: PLC0415  as above

    single = next((one for one in made if one.batch == 1), None)
    tasks = [
        task
        for block_run in block_runs
        for task in block_run.tasks
        if task.ids and block_run.place.batch == 1 and not block_run.place.repeat
    ]
    if single is None or not tasks or not asked.kept:
        return {}
    ours = [name for name in single.contenders if parse_spec(name).name in {AUTO, *all_methods()}]
    with waiting("measuring what a pass costs"):
        found: dict[str, Any] = attempt(lambda: roofline(llm, ours, single, tasks, asked.rows))
    return found


def _extras(asked: BenchOptions, llm: LLM, found: RunResults, answers: Any, measured: dict[str, Any]) -> Extras:
    from foreword.bench.report import Extras  # noqa: PLC0415  imports torch
    from foreword.bench.run import left_out  # noqa: PLC0415  as above
    from foreword.bench.spec_bench import spec_bench_figures  # noqa: PLC0415  as above

    figures = spec_bench_figures(answers, asked.plan.prompts, lambda text: len(llm.tokenizer.hf(text)["input_ids"]))
    left = left_out(asked.plan)
    return Extras(
        figures, left_out=left, warm_up_failed=found.warm_up_failed, needs_own_run=list(asked.excluded), **measured
    )


def _contenders(asked: BenchOptions, model: ModelOptions, llm: LLM, folder: Path, count: int) -> list[Contender]:
    from foreword import bench as room  # noqa: PLC0415  imports torch
    from foreword.model.cache import SharedCacheMemory  # noqa: PLC0415  as above

    context = model.max_context or room.context_for(llm, asked.plan.prompts, asked.plan.max_new_tokens)
    memory = SharedCacheMemory()

    def made(name: str) -> Contender:
        """Fail at once if this is the first batch size. A larger one may need more memory, so its error is reported."""
        try:
            return room.contender(llm, name, context, count, not model.no_cuda_graphs, memory, rows=asked.rows)
        except Exception as error:  # from any library; the report names it
            if count == asked.plan.batches[0]:
                raise
            return room.failing_contender(name, error)

    ours = [made(name) for name in asked.names]
    return ours + (room.make_baselines(asked.baselines, llm, folder, context) if count == 1 else [])


def _journal(asked: BenchOptions, model: ModelOptions, llm: LLM, out: Path | None) -> Journal:
    """Open the journal, which holds what an interrupted run of the same command has done."""
    from foreword.bench.journal import Journal  # noqa: PLC0415  imports torch
    from foreword.bench.report import facts  # noqa: PLC0415  as above
    from foreword.model.cost import CostCurve  # noqa: PLC0415  as above

    plan, origin = asked.plan, facts(llm.model.device)
    run = {
        "model": llm.model.name,
        "dtype": str(llm.model.dtype),
        "max_context": model.max_context,
        "compile or graph": [model.no_fused_layers, model.no_cuda_graphs],
        "machine": [origin["machine"], origin["threads"]],
        "version": [origin["versions"], origin["commit"]],
        "methods": [asked.methods, asked.names],
        "baselines": asked.baselines,
        "rows": asked.rows,
        "prompts": plan.prompts_sha256,
        "max_new_tokens": plan.max_new_tokens,
        "batch": plan.batches,
        "temperature": plan.temperatures,
        "repeats": plan.repeats,
    } | ({} if model.quantization is None else {"quantization": model.quantization})
    journal = Journal(out, run, llm.model.curve.to_dict() if llm.model.curve else None)
    with _reads(journal.file):
        llm.model.use_costs(CostCurve.read(journal.costs) if journal.costs else None)
    if journal.block_runs:
        note(f"resuming after {sum(len(block_run.tasks) for block_run in journal.block_runs.values())} answers")
    return journal


# Results -----------------------------------------------------------------------------------------------------------------


@contextmanager
def _reads(*files: Path | None) -> Iterator[None]:
    """Report missing or malformed content as an error that names the files."""
    try:
        yield
    except ForewordError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        names = " or ".join(str(file) for file in files)
        raise InputError(f"{names} is not what `foreword bench` writes ({error!r}); run it again") from error


def compare(
    before: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A folder that `foreword bench --out` wrote, or its results.json. A1,A2,...: runs to pool."
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="The same of a later run, to compare with A.")],
    at_least: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Exit with status 1 if the whole 95% interval of a contender lies below X. Default: no bound."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what became faster or slower from A to B, and whether the difference is more than noise.

    Compares the tables and contenders that both runs have, at batch 1, over the prompts that both answered. A change counts
    if the 95% interval of its ratio excludes 1. Example: foreword bench compare a1,a2,a3 b1,b2,b3 --at-least 0.98
    """
    from foreword.bench import read_results  # noqa: PLC0415  imports torch
    from foreword.bench.compare import changes, pooled, settings_that_differ  # noqa: PLC0415  as above

    sides = [[Path(name) for name in side.split(",")] for side in (before, after)]
    with _reads(*sides[0], *sides[1]):
        old, new = (pooled([read_results(run) for run in side]) for side in sides)
        found, differing = changes(old, new), settings_that_differ(old, new)
    if not found:
        raise InputError(f"{before} and {after} have no prompt in common that one contender answered alone in both")
    if json:
        rows = [{**asdict(change), "verdict": change.verdict} for change in found]
        print_json({"about": new["about"], "changes": rows, "settings_that_differ": differing})
    else:
        _print_changes(found, differing)
    if at_least is not None and any(change.is_below(at_least) for change in found if change.table == "overall"):
        raise typer.Exit(1)


def _print_changes(found: Sequence[Change], differing: dict[str, Any]) -> None:
    for name, (one, other) in differing.items():
        screen().print(f"{name} differs: {one} against {other}", soft_wrap=True)
    heads = ["contender", "A tokens/s", "B tokens/s", "B over A", "", "tokens per round", "other lengths"]
    for table in dict.fromkeys(change.table for change in found):
        body = [
            [
                change.contender,
                f"{change.before:.1f}",
                f"{change.after:.1f}",
                f"{change.ratio:.2f}x" + (f" [{change.low:.2f}, {change.high:.2f}]" if change.low is not None else ""),
                change.verdict,
                f"{change.tokens_per_round[0]:.2f} to {change.tokens_per_round[1]:.2f}",
                str(change.other_lengths),
            ]
            for change in found
            if change.table == table
        ]
        screen().print(_table(table, heads, body))


def table(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Folders that `foreword bench --out` wrote, or their results.json."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rewrite every table of this page that follows a line <!-- foreword bench table DIR -->. Default: print.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Print the table of this batch size.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0.0, help="Print the table of this temperature. Default: the first in the results."),
    ] = None,
) -> None:
    """Print the table of a benchmark as Markdown, or update the tables of a page, such as a README.

    In a page, the line before a table may also have --batch and --temperature, after the folder and in this order.
    """
    from foreword.bench import read_results  # noqa: PLC0415  imports torch
    from foreword.bench.published import published_table, refresh_tables  # noqa: PLC0415  as above

    if not results and into is None:
        raise typer.BadParameter("name a folder with results, or a page with --into")
    for folder in results or ():
        with _reads(folder):
            typer.echo(published_table(read_results(folder), batch, temperature), nl=False)
    if into is not None:
        if not os.path.isfile(into):
            raise InputError(f"{into} is not a regular file; name a page with tables in it")
        try:
            with _reads(into):
                into.write_text(refresh_tables(into.read_text(encoding="utf-8"), into.parent), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"the page {into} cannot be changed ({error.strerror}); name one that can be") from error


# The terminal -------------------------------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    from foreword.bench.markdown import warning_sentences, widened_sentences  # noqa: PLC0415  imports torch

    if "grown" in found["about"]:
        screen().print(widened_sentences(found["about"]["grown"]))
    _print_section(found, found["base"], f", T={found['temperature']:g}" if found["temperature"] else "")
    for temperature, section in found["temperatures"].items():
        _print_section(section, found["base"], f", T={temperature}")
    for sentence in warning_sentences(found):
        screen().print(sentence, soft_wrap=True)


def _print_section(section: dict[str, Any], base: str, suffix: str) -> None:
    from foreword.bench.markdown import HEADS, batch_tables, by_batch, cells, stops_paying_sentences  # noqa: PLC0415  imports torch

    for name, rows in section["tables"].items():
        heads = [head.format(base=base) for head in HEADS]
        screen().print(_table(name + suffix, ["contender", *heads], [[row["contender"], *cells(row)] for row in rows]))
    several = batch_tables(section["batches"], base)
    for title, (heads, body) in several.items():
        screen().print(_table(title + suffix, heads, body))
    if several:
        screen().print(_table(f"over {base} by batch{suffix}", *by_batch(section["batches"])))
        for sentence in stops_paying_sentences(section["stops_paying"], section["batches"]):
            screen().print(sentence)


def _table(title: str, heads: list[str], body: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for line in body:
        table.add_row(*line)
    return table
