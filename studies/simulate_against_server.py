"""The simulator against two real servers on this machine: `python studies/simulate_against_server.py --help`.

`costs`, `contention` and `http` measure what rounds, prompts and HTTP cost on one core. `run` starts two servers, each
pinned to a core of its own, sends a load, and notes when tokens came. `compare` simulates these loads from these costs, and
writes the report. Costs are measured over other prompts than loads have. Made results/simulate_cpu/results.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

import foreword
from foreword.core.sampling import Sampling
from foreword.hub.resolve import resolve
from foreword.simulate.arrivals import Arrival, Lengths, poisson
from foreword.simulate.costs import MethodCosts, Scheduling
from foreword.simulate.figures import ServingFigures, figures
from foreword.simulate.fleet import Fleet, simulate
from foreword.simulate.measure import batch_sizes, measure
from foreword.simulate.replica import HttpCosts, Ledger
from foreword.text import Tokenizer
from serve_speed import served
from serving_benchmark import passages
from study import ROOT, write

CORES = (0, 1)
SLOTS = 8
CONTEXT = 1024
WORK = ROOT / "build" / "simulate"  # what the parts leave for one another
IDLE = 0.02  # share of the cores that other programs use on an idle machine
TICKS = os.sysconf("SC_CLK_TCK")
SHORT, LONG, TIMES = 1, 33, 6  # tokens and number of the requests that HTTP is timed by

app = typer.Typer(help=__doc__)
Folder = Annotated[Path, typer.Option(help="Where the parts leave their figures for one another.")]


@dataclass(frozen=True)
class Setting:
    """A load for two servers."""

    method: str
    rate: float  # requests per second, to both servers together
    requests: int
    outputs: str = "32-96"

    def arrivals(self, prompts: list[tuple[int, ...]]) -> list[Arrival]:
        made = poisson(self.rate, self.requests, Lengths.parse("1"), Lengths.parse(self.outputs), seed=self.requests)
        return [one._replace(prompt_tokens=len(self.prompt(place, prompts))) for place, one in enumerate(made)]

    def prompt(self, place: int, prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
        return prompts[place % len(prompts)]


SETTINGS = {
    "plain, low rate": Setting("plain", 1.0, 40),
    "plain, saturated": Setting("plain", 20.0, 80),
    "echo, saturated": Setting("echo", 20.0, 80),
    "echo, mixed lengths": Setting("echo", 2.0, 60, "8-160"),
}


# The machine --------------------------------------------------------------------------------------------------------------


@contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Run what starts in this block on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(process: int) -> float:
    """Return the seconds that a process has computed."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(process: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for file in Path(f"/proc/{process}/task").glob("*/children") for one in file.read_text().split()]


def machine_seconds() -> float:
    """Return the seconds that all cores have computed."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS


class OthersShare:
    """Measures the share of the cores that other programs took during a block."""

    def __init__(self, processes: list[int]) -> None:
        self.processes = [os.getpid(), *processes]

    def _others(self) -> float:
        return machine_seconds() - sum(map(cpu_seconds, self.processes))

    def __enter__(self) -> OthersShare:
        self.since, self.before = time.perf_counter(), self._others()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = (time.perf_counter() - self.since) * len(CORES)
        self.share = max(self._others() - self.before, 0.0) / seconds


@contextmanager
def servers(method: str, cores: tuple[int, ...], slots: int) -> Iterator[tuple[list[tuple[str, int]], list[int]]]:
    """Run a server on each core. Yield their addresses, and the ids of their HTTP processes."""
    options = ["--method", method, "--slots", str(slots), "--max-context", str(CONTEXT), "--threads", "1", "--max-queued"]
    with ExitStack() as stack:
        addresses, before = [], set(children(os.getpid()))
        for core in cores:
            with pinned(core):
                addresses.append(stack.enter_context(served([*options, "4096"])))
        yield addresses, sorted(set(children(os.getpid())) - before)


# A client -----------------------------------------------------------------------------------------------------------------


async def asked(address: tuple[str, int], prompt: tuple[int, ...], tokens: int) -> list[float]:
    """Stream a completion, and return when its chunks came."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "reuse": False}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(*address)
    # HTTP/1.0: the body ends with the connection, and is not in chunks.
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    times = [time.perf_counter() async for line in reader if line.startswith(b"data: {")]
    writer.close()
    if not times:
        raise RuntimeError("the server refused a request")
    return times


async def served_load(addresses: list[tuple[str, int]], arrivals: list[Arrival], prompts: list[tuple[int, ...]]) -> Ledger:
    """Send requests when they arrive, each to the server with the fewest; return what happened to them."""
    open_requests, started, last = [0] * len(addresses), time.perf_counter(), -1
    sent: list[Arrival] = list(arrivals)
    ledger = Ledger(sent)

    async def one(place: int, server: int) -> None:
        sent[place] = arrivals[place]._replace(second=time.perf_counter() - started)
        times = await asked(addresses[server], prompts[place], arrivals[place].output_tokens)
        open_requests[server] -= 1
        ledger.first[place], ledger.ended[place] = times[0] - started, times[-1] - started
        ledger.tokens[place] = arrivals[place].output_tokens

    async with asyncio.TaskGroup() as tasks:
        for place, arrival in enumerate(arrivals):
            await asyncio.sleep(max(arrival.second - (time.perf_counter() - started), 0))
            turns = [(last + 1 + turn) % len(addresses) for turn in range(len(addresses))]
            last = min(turns, key=lambda server: open_requests[server])
            open_requests[last] += 1
            tasks.create_task(one(place, last))
    return ledger


# The parts ----------------------------------------------------------------------------------------------------------------


def split_prompts() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return prompts to measure costs over, and others for loads."""
    tokenizer = Tokenizer.load(resolve(None))
    found = [tuple(tokenizer.encode(prompt)) for prompt, _ in passages(tokenizer)]
    return found[::2], found[1::2]


@app.command(hidden=True)
def one_core(methods: str, batches: str, out: Path) -> None:
    """Measure methods, separated by commas, on the core that this process runs on."""
    prompts, _ = split_prompts()
    sizes = [int(batch) for batch in batches.split(",")]
    with foreword.load(method="plain", slots=SLOTS, threads=1, max_context=CONTEXT, isolated=True) as llm:
        found = {name: measure(llm.use(name), prompts, sizes, Sampling(seed=0)).to_dict() for name in methods.split(",")}
    out.write_text(json.dumps(found), encoding="utf-8")


def measured_on(cores: tuple[int, ...], methods: str, batches: list[int], work: Path) -> list[dict[str, MethodCosts]]:
    """Measure methods on several cores at the same time."""
    files, running = [work / f"core{core}.json" for core in cores], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for core, file in zip(cores, files, strict=True):
        with pinned(core):
            command = [sys.executable, __file__, "one-core", methods, ",".join(map(str, batches)), str(file)]
            running.append(subprocess.Popen(command, env=environment))
    if any([process.wait() for process in running]):
        raise RuntimeError("a measurement failed")
    found = [json.loads(file.read_text()) for file in files]
    return [{name: MethodCosts.read(one) for name, one in of_core.items()} for of_core in found]


@app.command()
def costs(methods: str = "plain,echo", work: Folder = WORK) -> None:
    """Measure rounds and prompts on one core, while the other one is idle."""
    work.mkdir(parents=True, exist_ok=True)
    (alone,) = measured_on(CORES[:1], methods, batch_sizes(SLOTS), work)
    (work / "costs.json").write_text(json.dumps({name: one.to_dict() for name, one in alone.items()}), encoding="utf-8")
    for name, one in alone.items():
        for round_cost in one.rounds:
            print(f"{name}, {round_cost.batch}: {round_cost.seconds * 1e3:.2f} ms, {round_cost.tokens:.2f} tokens")
        print(f"{name}, prompts: {dict(zip(one.prompts.rows, one.prompts.seconds, strict=True))}")


@app.command()
def contention(work: Folder = WORK) -> None:
    """Measure how much longer rounds and prompts take while the other core runs them too."""
    (alone,) = measured_on(CORES[:1], "plain", [1, SLOTS], work)
    both = measured_on(CORES, "plain", [1, SLOTS], work)
    ratio = median(slow / fast for one in both for slow, fast in zip(_times(one), _times(alone), strict=True))
    (work / "contention.json").write_text(json.dumps(max(ratio, 1.0)), encoding="utf-8")
    print(f"steps take {ratio:.3f} times as long")


def _times(of_core: dict[str, MethodCosts]) -> list[float]:
    found = of_core["plain"]
    return [*(one.seconds for one in found.rounds), *found.prompts.seconds[1:]]


@app.command()
def http(work: Folder = WORK) -> None:
    """Measure what the HTTP process computes for a request and for a chunk."""
    _, prompts = split_prompts()

    async def work_of(address: tuple[str, int], process: int, tokens: int) -> tuple[float, int]:
        before, chunks = cpu_seconds(process), 0
        for prompt in prompts[:TIMES]:
            chunks += len(await asked(address, prompt, tokens))
        return cpu_seconds(process) - before, chunks

    with servers("plain", CORES[:1], 1) as ((address,), (process,)):
        asyncio.run(work_of(address, process, SHORT))  # warm up
        short, few = asyncio.run(work_of(address, process, SHORT))
        long, many = asyncio.run(work_of(address, process, LONG))
    chunk = (long - short) / (many - few)
    found = {"request_s": max(short / TIMES - chunk, 0.0), "chunk_s": chunk}
    (work / "http.json").write_text(json.dumps(found), encoding="utf-8")
    print(found)


@app.command()
def run(setting: str, work: Folder = WORK) -> None:
    """Run two servers under one load. Settings: see SETTINGS."""
    chosen = SETTINGS[setting]
    _, prompts = split_prompts()
    arrivals = chosen.arrivals(prompts)
    given = [chosen.prompt(place, prompts) for place in range(len(arrivals))]
    with servers(chosen.method, CORES, SLOTS) as (addresses, processes):
        warm = [Arrival(0.0, len(prompt), 8) for prompt in given[:4]]
        asyncio.run(served_load(addresses, warm, given))
        engines = [child for process in processes for child in children(process)]
        with OthersShare([*processes, *engines]) as others:
            ledger = asyncio.run(served_load(addresses, arrivals, given))
    kept = {
        "setting": {"name": setting, **asdict(chosen)},
        "others_share": others.share,
        "arrivals": [[*one[:3]] for one in ledger.arrivals],
        "first": ledger.first.tolist(),
        "ended": ledger.ended.tolist(),
    }
    (work / f"{list(SETTINGS).index(setting)}.json").write_text(json.dumps(kept), encoding="utf-8")
    found = measured_figures(kept)
    print(f"{setting}: {found.tokens_per_s:.1f} tokens/s; other programs used {others.share:.1%} of the cores")


def measured_figures(kept: dict[str, Any]) -> ServingFigures:
    """Return the figures of what a client saw."""
    ledger = Ledger([Arrival(*one) for one in kept["arrivals"]])
    ledger.first, ledger.ended = np.array(kept["first"]), np.array(kept["ended"])
    ledger.tokens = np.array([one.output_tokens for one in ledger.arrivals])
    return figures(ledger, Fleet(len(CORES), SLOTS))


@app.command()
def compare(out: Path, work: Folder = WORK) -> None:
    """Simulate the loads that `run` has measured, and write results.json and report.md into a folder."""
    known = json.loads((work / "costs.json").read_text())
    longer = json.loads((work / "contention.json").read_text())
    http_costs = HttpCosts(**json.loads((work / "http.json").read_text()), shares_core=True)
    fleet = Fleet(len(CORES), SLOTS, http=http_costs, contention=longer)
    methods = {name: MethodCosts.read(one) for name, one in known.items()}
    scheduling, found = Scheduling.on(torch.device("cpu"), "float32"), []
    for place in range(len(SETTINGS)):
        kept = json.loads((work / f"{place}.json").read_text())
        arrivals = sorted(Arrival(*one) for one in kept["arrivals"])
        ledger = simulate(methods[kept["setting"]["method"]], scheduling, fleet, arrivals)
        found.append({**kept["setting"], "others_share": kept["others_share"], **_pairs(ledger, fleet, kept)})
    most = max(one["others_share"] for one in found)
    about = write(
        out / "results.json",
        "predicted",
        found,
        torch.device("cpu"),
        model="SmolLM2-135M-Instruct",
        dtype="float32",
        replicas=len(CORES),
        slots=SLOTS,
        contention=longer,
        http=asdict(http_costs),
        costs=known,
        **({"note": f"other programs used up to {most:.0%} of the cores"} if most > IDLE else {}),
    )
    (out / "report.md").write_text(report(about, found), encoding="utf-8")
    print(report(about, found))


def _pairs(ledger: Ledger, fleet: Fleet, kept: dict[str, Any]) -> dict[str, Any]:
    """Return what was predicted and what was measured."""
    sides = {"simulated": figures(ledger, fleet), "measured": measured_figures(kept)}
    return {side: _figures(one) for side, one in sides.items()}


def _figures(one: ServingFigures) -> dict[str, float]:
    spreads = {"first token": one.first_token_s, "between tokens": one.between_tokens_s, "request": one.request_s}
    found = {"tokens/s": one.tokens_per_s}
    for name, spread in spreads.items():
        assert spread is not None, "every load has requests"
        found |= {f"{name} ms, p50": spread.p50 * 1e3, f"{name} ms, p95": spread.p95 * 1e3}
    return found


def report(about: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Return the report as a page."""
    columns = list(found[0]["simulated"])
    lines = ["| load | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for one in found:
        for side in ("simulated", "measured"):
            lines.append(f"| {one['name']}, {side} | " + " | ".join(f"{one[side][name]:.1f}" for name in columns) + " |")
        ratios = " | ".join(f"{one['simulated'][name] / one['measured'][name] - 1:+.0%}" for name in columns)
        lines.append(f"| difference | {ratios} |")
    loads = "\n".join(
        f"| {one['name']} | `{one['method']}` | {one['requests']} at {one['rate']:g}/s | {one['outputs']} | "
        f"{one['others_share']:.1%} |"
        for one in found
    )
    table = "\n".join(lines)
    return f"""# `foreword simulate` against two real servers

{about["model"]}, {about["dtype"]}, on {about["machine"]}, {about["date"]}, commit {about["commit"]}. Two servers of
{SLOTS} slots, each with one thread on a core of its own; HTTP shares that core. Prompts are passages of 100 to 250 tokens of
this documentation, other ones than costs were measured over. Other programs ran on the machine, at a lower priority.

| load | method | requests | output tokens | cores that other programs used |
|---|---|---|---|---|
{loads}

Steps take {about["contention"]:.3f} times as long while the other core works. HTTP computes
{about["http"]["request_s"] * 1e3:.2f} ms for a request and {about["http"]["chunk_s"] * 1e3:.2f} ms for a chunk.

{table}

Made by the parts `costs`, `contention`, `http`, `run` (once for each load), then `{about["command"]}`.
"""


if __name__ == "__main__":
    app()
