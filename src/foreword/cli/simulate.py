"""`foreword simulate`: how fast a fleet of servers is under a load, and how many replicas a load needs, on paper."""

from __future__ import annotations

import json as encoder
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from foreword.cli.console import bar, complain, note, print_json, screen
from foreword.cli.options import Json, MethodOptions, ModelOptions, Remeasure, measuring
from foreword.errors import InputError, StorageError
from foreword.methods import AUTO

if TYPE_CHECKING:
    from foreword.simulate.arrivals import Arrival
    from foreword.simulate.costs import MethodCosts, ServingCosts
    from foreword.simulate.figures import ServingFigures, Spread
    from foreword.simulate.fleet import Fleet
    from foreword.simulate.sizing import LatencyGoal

SIMULATE_EXAMPLES = """\
[bold]Examples[/]

  foreword simulate --rate 2 --prompt-tokens 100-250 --output-tokens 64

  foreword simulate --rate 5 --p95-ttft 500ms --replicas auto --method echo

  foreword simulate --costs results/bench_cuda_7b --costs results/bench_cuda_7b_batches --method echo --rate 20 --slots 32

  foreword simulate --trace arrivals.jsonl --replicas 4 --routing session --out simulated.json
"""

LOAD, FLEET, COSTS = "Load", "Fleet", "Costs"  # panels of --help
_of_load = partial(typer.Option, rich_help_panel=LOAD)
_of_fleet = partial(typer.Option, rich_help_panel=FLEET)
_of_costs = partial(typer.Option, rich_help_panel=COSTS)
# The defaults of --http-request and --http-chunk are what a core of a CPU took: results/simulate_cpu.
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PLAIN = "plain"
SPREADS = {  # of the table, and where the figures are
    "first token, ms: mean / p50 / p95 / p99": "first_token_s",
    "between tokens, ms": "between_tokens_s",
    "between rounds, ms": "between_rounds_s",
    "wait for a slot, ms": "queue_s",
    "whole request, ms": "request_s",
}


def seconds(text: str) -> float:
    """Parse a time such as 500ms."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time; give a number with its unit, such as 500ms, 2s or 15us")
    return float(found[1]) * UNITS[found[2]]


def _time(text: str | None) -> str | None:
    """Check a time where it is given, and keep it: typer shows it as the default."""
    if text is not None:
        seconds(text)
    return text


def _replicas(text: str) -> str:
    if text != AUTO and not (text.isdecimal() and 1 <= int(text) <= 4096):
        raise typer.BadParameter(f"{text!r} is neither a number from 1 to 4096 nor auto")
    return text


@dataclass(frozen=True)
class LoadOptions:
    """When requests arrive and how long they are."""

    rate: Annotated[float, _of_load(min=1e-6, max=1e6, metavar="X", help="Requests per second, on average.")] = 1.0
    requests: Annotated[int, _of_load(min=1, max=1_000_000, metavar="N", help="How many requests are simulated.")] = 1000
    prompt_tokens: Annotated[
        str,
        _of_load(metavar="LENGTHS", help="Tokens of a prompt: N, LOW-HIGH (uniform), exp:MEAN or lognormal:MEDIAN:SIGMA."),
    ] = "256"
    output_tokens: Annotated[str, _of_load(metavar="LENGTHS", help="Tokens of an output, in the same way.")] = "128"
    trace: Annotated[
        Path | None,
        _of_load(
            metavar="FILE",
            help="A recorded trace in place of the four above: JSON lines with arrival (seconds), prompt_tokens, "
            "output_tokens and perhaps session. Default: random arrivals.",
        ),
    ] = None
    seed: Annotated[int, _of_load(min=0, metavar="N", help="Of arrivals, lengths and accepted tokens.")] = 0

    def arrivals(self) -> list[Arrival]:
        from foreword.simulate.arrivals import Lengths, poisson, read_arrivals  # noqa: PLC0415  start-up time: numpy

        if self.trace is not None:
            return read_arrivals(self.trace)
        lengths = Lengths.parse(self.prompt_tokens), Lengths.parse(self.output_tokens)
        return poisson(self.rate, self.requests, *lengths, self.seed)


@dataclass(frozen=True)
class FleetOptions:
    """How many servers, how each is set up, and what is asked of them."""

    replicas: Annotated[
        str,
        _of_fleet(
            callback=_replicas, metavar="N|auto", help="How many servers. auto: the fewest that keep up and meet the goals."
        ),
    ] = "1"
    slots: Annotated[int, _of_fleet(min=1, max=4096, metavar="N", help="Outputs that run at a time, per replica.")] = 8
    routing: Annotated[
        str,
        _of_fleet(
            metavar="NAME",
            help="least-loaded: to the replica with the fewest requests. session: all of a session to the same replica.",
        ),
    ] = "least-loaded"
    max_queued: Annotated[
        int, _of_fleet(min=0, metavar="N", help="Outputs that may wait for a slot, per replica; further ones are refused.")
    ] = 256
    tp: Annotated[int, _of_fleet(min=1, max=64, metavar="N", help="GPUs per replica (tensor parallelism).")] = 1
    layers: Annotated[
        int | None, _of_fleet(min=1, metavar="N", help="Decoder layers of the model, for --tp. Default: unknown.")
    ] = None
    all_reduce: Annotated[
        str | None,
        _of_fleet(
            metavar="TIME",
            help="What an all-reduce takes, for --tp: 15us, or by the rows of a pass: 1:12us,1024:60us. Default: unknown.",
        ),
    ] = None
    tp_share: Annotated[
        float | None,
        _of_fleet(
            min=0,
            max=1,
            metavar="X",
            help="The share of a pass that --tp divides. Default: that of reading weights, if the costs have it.",
        ),
    ] = None
    p95_ttft: Annotated[
        str | None,
        _of_fleet(
            callback=_time, metavar="TIME", help="Goal: the time to the first token, at the 95th percentile. Default: any."
        ),
    ] = None
    p95_between: Annotated[
        str | None,
        _of_fleet(
            callback=_time, metavar="TIME", help="Goal: the mean time between tokens of a request, likewise. Default: any."
        ),
    ] = None

    def fleet(self, http: HttpOptions) -> Fleet:
        from foreword.simulate.fleet import Fleet, Routing  # noqa: PLC0415  start-up time: numpy
        from foreword.simulate.replica import HttpCosts  # noqa: PLC0415  as above

        if self.routing not in list(Routing):
            raise typer.BadParameter(f"{self.routing!r} is not {' or '.join(Routing)}", param_hint="--routing")
        count = 1 if self.replicas == AUTO else int(self.replicas)
        costs = HttpCosts(seconds(http.http_request), seconds(http.http_chunk), http.http_shares_core)
        return Fleet(count, self.slots, Routing(self.routing), self.max_queued, costs, http.contention)

    def goal(self) -> LatencyGoal:
        from foreword.simulate.sizing import LatencyGoal  # noqa: PLC0415  start-up time: numpy

        wanted = (None if one is None else seconds(one) for one in (self.p95_ttft, self.p95_between))
        return LatencyGoal(*wanted)

    def divided(self, costs: MethodCosts, known_share: float | None) -> MethodCosts:
        """Return the costs on --tp GPUs. What they depend on and nobody has measured is refused by its name."""
        if self.tp == 1:
            return costs
        from foreword.simulate.tensor_parallel import TensorParallel, all_reduce_curve  # noqa: PLC0415  imports torch

        share = known_share if self.tp_share is None else self.tp_share
        given = {"--layers": self.layers, "--all-reduce": self.all_reduce, "--tp-share": share}
        if unknown := [name for name, value in given.items() if value is None]:
            raise InputError(f"--tp {self.tp} needs {', '.join(unknown)}: the costs do not say; measure and give them")
        assert self.layers is not None and self.all_reduce is not None and share is not None
        pairs = [one.rpartition(":") for one in self.all_reduce.split(",")]
        points = [(int(rows) if rows.isdecimal() else 1, seconds(took)) for rows, _, took in pairs]
        return TensorParallel(self.tp, self.layers, share, all_reduce_curve(points)).of(costs)


@dataclass(frozen=True)
class HttpOptions:
    """Where costs come from, and those that results of benchmarks do not have."""

    costs: Annotated[
        list[Path],
        _of_costs(
            metavar="FILE",
            help="Results of `foreword bench` or of this command; several of one model and machine complete each other. "
            "Default: this machine is measured, with --model, once.",
        ),
    ] = field(default_factory=list)
    temperature: Annotated[float, _of_costs(min=0, metavar="X", help="The temperature that drafts were accepted at.")] = 0.0
    http_request: Annotated[
        str, _of_costs(callback=_time, metavar="TIME", help="HTTP: from a request's arrival until the engine has it.")
    ] = "4ms"
    http_chunk: Annotated[
        str, _of_costs(callback=_time, metavar="TIME", help="HTTP: from the end of a round until the client has its tokens.")
    ] = "0.6ms"
    http_shares_core: Annotated[
        bool, _of_costs("--http-shares-core", metavar="", help="HTTP and engine share one core: rounds wait for HTTP.")
    ] = False
    contention: Annotated[
        float,
        _of_costs(
            min=1, metavar="X", help="How much longer steps take while another replica runs one, on a machine they share."
        ),
    ] = 1.0


def simulate(
    load: LoadOptions,
    fleet: FleetOptions,
    http: HttpOptions,
    model: ModelOptions,
    method: MethodOptions,
    remeasure: Remeasure = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Write figures and costs to this JSON file, for --costs. Default: none.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Predict how fast servers are under a load, and how many a load needs, with and without drafting.

    Requests arrive at random or as recorded. Simulated servers schedule them as `foreword serve` does: slots, chunks of
    prompts, rounds of all running requests. How long a round takes and how many tokens it decides was measured, by
    `foreword bench` or now on this machine; what was not measured is refused. Nothing is generated, and no GPU is needed.
    --replicas auto finds the fewest servers that keep up and meet --p95-ttft and --p95-between. docs/simulate.md explains
    the model and says how far it was off.
    """
    arrivals, shape, goal = load.arrivals(), fleet.fleet(http), fleet.goal()
    with measuring(remeasure):
        costs, name = _costs(http, fleet, model, method)
    from foreword.simulate.sizing import Load, smallest_fleet  # noqa: PLC0415  start-up time: numpy

    asked, found = Load(arrivals, costs.scheduling, load.seed), {}
    for one in dict.fromkeys((PLAIN, name)):
        with bar(f"simulating {one}") as update:
            serve = partial(asked.served_by, fleet.divided(costs.of(one), costs.reading_share), partial(update, one))
            wanted = fleet.replicas == AUTO
            found[one] = smallest_fleet(serve, shape, goal, len(arrivals)) if wanted else (shape, serve(shape))
    used = replace(costs, methods={one: costs.of(one) for one in found})
    content = {"about": _about(costs, load, fleet, http), "simulated": _simulated(found, goal), "costs": used.to_dict()}
    if out is not None:
        _write(out, content)
        note(f"written: {out}")
    if json:
        print_json(content)
    else:
        _print(costs, found, arrivals, goal, fleet)


def _costs(http: HttpOptions, fleet: FleetOptions, model: ModelOptions, method: MethodOptions) -> tuple[ServingCosts, str]:
    """Return costs, and the name of the method in them."""
    if not http.costs:
        return _measured(http, fleet, model, method)
    from foreword.simulate.files import read_costs  # noqa: PLC0415  imports torch

    costs = read_costs(http.costs, http.temperature)
    if method.method == AUTO:
        raise InputError(f"--costs has several methods, and auto needs a machine; give --method: {', '.join(costs.methods)}")
    return costs, costs.of(method.method).method


def _measured(
    http: HttpOptions, fleet: FleetOptions, model: ModelOptions, method: MethodOptions
) -> tuple[ServingCosts, str]:
    with model.load(method, fleet.slots, isolated=True) as llm, bar("measuring rounds") as update:
        from foreword.core.sampling import Sampling  # noqa: PLC0415  imports torch
        from foreword.simulate.measure import measured_costs  # noqa: PLC0415  as above

        name = llm.method
        costs = measured_costs(
            llm, [*dict.fromkeys((name, PLAIN))], fleet.slots, Sampling(temperature=http.temperature, seed=0), update
        )
    for one in costs.methods.values():
        if not one.steady:
            complain(f"costs of {one.method} may be too high: {one.suspect}; try --remeasure later", "warning", "yellow")
    return costs, name


def _about(costs: ServingCosts, load: LoadOptions, fleet: FleetOptions, http: HttpOptions) -> dict[str, Any]:
    from foreword.bench.report import facts  # noqa: PLC0415  imports torch

    asked = {**asdict(load), **asdict(fleet), **asdict(http)}
    settings = {name: _plain_value(value) for name, value in asked.items()}
    return {**facts(), "model": costs.model, "costs_of": costs.machine, "dtype": costs.dtype, "settings": settings}


def _plain_value(value: Any) -> Any:
    return [str(one) for one in value] if isinstance(value, list) else str(value) if isinstance(value, Path) else value


def _simulated(found: Mapping[str, tuple[Fleet, ServingFigures]], goal: LatencyGoal) -> dict[str, Any]:
    return {
        name: {
            "replicas": fleet.replicas,
            "keeps_up": figures.keeps_up,
            "meets_goal": goal.is_met(figures),
            **asdict(figures),
        }
        for name, (fleet, figures) in found.items()
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(encoder.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{file} cannot be written ({error.strerror}); name another with --out") from error


def _print(
    costs: ServingCosts,
    found: Mapping[str, tuple[Fleet, ServingFigures]],
    arrivals: Sequence[Arrival],
    goal: LatencyGoal,
    options: FleetOptions,
) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    for label, shown in _rows(goal, options.tp):
        table.add_row(label, *(shown(*one) for one in found.values()))
    screen().print(table)
    screen().print()
    prompt, output = _mean(one.prompt_tokens for one in arrivals), _mean(one.output_tokens for one in arrivals)
    lines = [
        f"load: {len(arrivals)} requests in {arrivals[-1].second:.1f} s; on average {prompt} prompt, {output} output tokens",
        f"costs: {costs.model} on {costs.machine}, {costs.dtype}; {costs.of(next(iter(found))).source}",
        *costs.notes,
    ]
    lines += (
        [f"{options.tp} GPUs per replica are a prediction: nothing was measured on more than one"] if options.tp > 1 else []
    )
    for line in lines:
        screen().print(Text(line, "dim"), soft_wrap=True)


def _mean(values: Iterable[int]) -> str:
    return f"{mean(values):.0f}"


Show = Callable[["Fleet", "ServingFigures"], str]


def _rows(goal: LatencyGoal, tp: int) -> list[tuple[str, Show]]:
    """Return the rows of the table: a label, and what shows it."""
    rows: list[tuple[str, Show]] = [("replicas", lambda fleet, _: str(fleet.replicas))]
    if tp > 1:
        rows.append(("GPUs", lambda fleet, _: str(fleet.replicas * tp)))
    rows += [
        ("keeps up with the load", lambda _, one: "yes" if one.keeps_up else "no"),
        ("output tokens/s", lambda _, one: f"{one.tokens_per_s:.1f}"),
        ("requests/s", lambda _, one: f"{one.requests_per_s:.2f}"),
        ("tokens per round", lambda _, one: f"{one.tokens_per_round:.2f}"),
    ]
    for label, name in SPREADS.items():
        rows.append((label, lambda _, one, name=name: _spread(getattr(one, name))))  # type: ignore[misc]
    rows += [
        ("slots used", lambda _, one: f"{one.slots_used:.0%}"),
        ("busy", lambda _, one: f"{one.busy:.0%}"),
        ("refused, of all requests", lambda _, one: f"{one.refused} of {one.refused + one.requests}"),
    ]
    if goal.wanted:
        rows.append(("meets the goal", lambda _, one: "yes" if goal.is_met(one) else "no"))
    return rows


def _spread(found: Spread | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{value * 1e3:.1f}" for value in (found.mean, found.p50, found.p95, found.p99))
