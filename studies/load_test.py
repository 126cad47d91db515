"""A load test of a real server: a thousand streams at a time, of which some vanish and some are rubbish.

    python studies/load_test.py --out results/load_cpu

`foreword serve` runs with a tiny model of random weights, its engine in a process below it; this process is its clients.
The library writes the outputs of all prompts first. The test fails if a stream that was read to its end differs from them,
if either process keeps slots, descriptors, threads, tasks or memory, or if /health answers late. It ends by itself.
Made results/load_cpu/results.json.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import uvloop
from rich.table import Table

from foreword.bench.report import facts
from foreword.cli.console import bar, complain, screen, waiting
from real_server import RealServer
from study import command
from under_load.cases import CONTEXT, DTYPE, cases
from under_load.load import Findings, Load, Plan, State, percentile
from under_load.tiny_model import save_tiny_model

MOST_S = 480.0  # for all requests; with what comes before, the test ends within ten minutes
HEALTH_P99_MS = 100.0
GROWTH = 0.03  # of resident memory, from the early requests to the end
CASES = 200

Figures = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A figure and its limit."""

    name: str
    value: str
    limit: str
    passed: bool


def server_options(queued: int) -> list[str]:
    """Return the options of the server that is tested. On two cores, one thread is left to HTTP and the clients."""
    return [
        *("--dtype", DTYPE, "--max-context", str(CONTEXT), "--method", "prompt_lookup", "--threads", "1"),
        *("--max-queued", str(queued)),
    ]


def figures(found: Findings) -> Figures:
    """Return everything that was measured, for the result file."""
    states = {"before": found.before, "early": found.early, "after": found.after}
    return {
        "requests": dict(sorted(found.kinds.items())),
        "most_at_a_time": found.most_open,
        "different": found.different,
        "differences": found.differences,
        "seconds": round(found.seconds, 2),
        "tokens_per_s": round(found.tokens / found.seconds, 1) if found.seconds else 0.0,
        "first_token_s": _spread(found.firsts),
        "health_ms": {"answers": len(found.health), **_spread(found.health)},
        "states": {name: asdict(state) for name, state in states.items() if state is not None},
    }


def _spread(values: list[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: round(percentile(values, share), 3) for name, share in shares.items()}


def checks(found: Findings, log: str) -> list[Check]:
    """Compare what was found with the limits. `log`: what the server wrote to stderr."""
    if found.before is None or found.early is None or found.after is None:
        return [Check("the load came to its end", "no", f"within {MOST_S:g} s", False)]
    left = [*left_behind(found.before, found.early, found.after), *memory(found.early, found.after)]
    return [*outputs(found, log), *left, health(found.health)]


def outputs(found: Findings, log: str) -> list[Check]:
    whole = found.kinds["read to the end"]
    return [
        Check("answers that are not as expected", f"{found.different} of {whole}", "0", not found.different and whole > 0),
        Check("failures in the server's log", str(log.count("Traceback")), "0", "Traceback" not in log),
    ]


def left_behind(before: State, early: State, after: State) -> list[Check]:
    """Check that nothing is left of the load. Threads of a pool come with the first requests and stay."""
    made = []
    for name in ("requests_running", "requests_waiting"):
        left = after.gauges[name]
        made.append(Check(f"{name.replace('_', ' ')} after the load", f"{left:g}", "0", left == 0))
    made.append(_no_more("tasks of the server", after.gauges["tasks"], before.gauges["tasks"], "before"))
    for process, now in after.held.items():
        made += [
            _no_more(f"descriptors of the {process}", now.descriptors, before.held[process].descriptors, "before"),
            _no_more(f"threads of the {process}", now.threads, early.held[process].threads, "early on"),
        ]
    return made


def memory(early: State, after: State) -> list[Check]:
    made = []
    for process, now in after.held.items():
        then = early.held[process].rss_mib
        growth = now.rss_mib / then - 1
        shown = f"{then:.1f} to {now.rss_mib:.1f} MiB, {growth:+.1%}"
        made.append(Check(f"memory of the {process}", shown, f"{GROWTH:+.0%}", growth <= GROWTH))
    return made


def health(milliseconds: list[float]) -> Check:
    slow = percentile(milliseconds, 0.99)
    return Check("p99 of /health", f"{slow:.1f} ms", f"{HEALTH_P99_MS:g} ms", 0 < slow < HEALTH_P99_MS)


def _no_more(name: str, after: float, before: float, when: str) -> Check:
    return Check(name, f"{after:g}", f"{before:g}, as {when}", after <= before)


def tables(found: Figures, made: list[Check]) -> list[Table]:
    """Return the checks, and the figures that have no limit."""
    limits = Table("check", "found", "limit", "", title="Checks")
    for one in made:
        limits.add_row(one.name, one.value, one.limit, "[green]passed[/]" if one.passed else "[bold red]missed[/]")
    others = Table("figure", "value", title="Figures")
    for name, value in _shown(found):
        others.add_row(name, value)
    return [limits, others]


def _shown(found: Figures) -> list[tuple[str, str]]:
    """Return the figures without a limit, by name."""
    health, first = found["health_ms"], found["first_token_s"]
    spread = "p50 {p50:.{digits}f}, p99 {p99:.{digits}f}, worst {worst:.{digits}f} {unit}"
    return [
        *((f"requests: {kind}", str(count)) for kind, count in found["requests"].items()),
        ("requests at a time, at most", str(found["most_at_a_time"])),
        ("seconds", f"{found['seconds']:.1f}"),
        ("tokens per second", f"{found['tokens_per_s']:.0f}"),
        ("first token, the wait included", spread.format(**first, digits=2, unit="s")),
        (f"/health, {health['answers']} answers", spread.format(**health, digits=1, unit="ms")),
    ]


def report(about: Figures, found: Figures, made: list[Check]) -> str:
    """Return the result as a page."""
    lines = ["# A server under load", "", f"`{about['command']}`", "", f"{about['machine']}, commit {about['commit']}."]
    lines += ["", "| check | found | limit | |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.value} | {one.limit} | {'passed' if one.passed else 'missed'} |" for one in made]
    lines += ["", "| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in _shown(found))]
    return "\n".join(lines) + "\n"


async def _within(load: Load, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await load.run()
    except TimeoutError:  # the checks say so; what was found until then is kept
        return


def load_test(
    out: Annotated[Path | None, typer.Option(help="Write results.json and report.md to this folder. Default: none.")] = None,
    requests: Annotated[
        int, typer.Option(min=2, help="Requests, the early ones included, after as many for warming up as come at a time.")
    ] = 5000,
    early: Annotated[int, typer.Option(min=1, help="Memory after all is compared with memory after these.")] = 500,
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 1000,
    slots: Annotated[int, typer.Option(min=1, help="Slots of the server; further requests wait.")] = 16,
    vanishing: Annotated[float, typer.Option(min=0, max=1, help="Part of the clients that leave early.")] = 0.2,
    rubbish: Annotated[float, typer.Option(min=0, max=1, help="Part of the clients that send rubbish.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
) -> None:
    """Load a server until it has answered thousands of requests, and check that nothing is wrong or left behind.

    A stream passes if its text, tokens, reasons and log-probabilities are those that the library writes for its prompt and
    seed. Clients vanish in the middle of a body, in the queue, in the stream and after the last token. Rubbish is malformed
    JSON, wrong types, bad chunks, huge headers, silence. /health is asked every 50 ms from a third process. The exit status
    is 1 if a limit is missed. Nothing runs longer than ten minutes; times mean something on an idle machine only.
    """
    plan = Plan(requests, min(early, requests - 1), streams, vanishing, rubbish, seed)
    with tempfile.TemporaryDirectory() as folder:
        with waiting("the library writes what the streams will be compared with"):
            save_tiny_model(Path(folder))
            known = cases(Path(folder), CASES, seed)
        with RealServer(Path(folder), *server_options(queued=1000), slots=slots) as server:
            with bar("load") as progress:
                load = Load(server, known, plan, progress)
                try:
                    uvloop.run(_within(load, MOST_S))
                except Exception:
                    complain(f"the server or its engine has ended; it wrote: {''.join(server.lines[-20:])}")
                    raise
            log = "".join(server.lines)
    found, made = figures(load.findings), checks(load.findings, log)
    for one in tables(found, made):
        screen().print(one)
    for problem in load.findings.differences:
        screen().print(problem, markup=False)
    if out is not None:
        _keep(out, found, made, slots=slots, streams=streams, seed=seed)
    if not all(one.passed for one in made):
        raise typer.Exit(1)


def _keep(out: Path, found: Figures, made: list[Check], **more: Any) -> None:
    about = facts(torch.device("cpu"), model="a tiny llama of random weights", dtype=DTYPE, **more)
    about["command"] = command()
    out.mkdir(parents=True, exist_ok=True)
    result = {"about": about, "load": found, "checks": [asdict(one) for one in made]}
    out.joinpath("results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.joinpath("report.md").write_text(report(about, found, made), encoding="utf-8")


if __name__ == "__main__":
    typer.run(load_test)
