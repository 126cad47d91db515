"""Roofline: bytes and operations of a pass by rows, its share of the machine's peak, and when a method breaks even.

In: a loaded model, its benchmark at batch 1, and a few of the tasks. Out: a plain dictionary for the report; if a
measurement fails, the reason replaces its figures. At the knee, the rows of a pass at the cost of one more row each cost as
much as a pass of one row: reading the weights no longer hides them. A method breaks even when a round decides as many tokens
as it costs in rounds of plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from foreword.api import LLM
from foreword.bench.contenders import GenerationSettings, Task, generate_answers
from foreword.bench.figures import Benchmark, Timing
from foreword.bench.passes import Probe, bytes_of_pass, cuda_milliseconds, milliseconds
from foreword.bench.profile import GenerationTimer, attempt, bandwidth
from foreword.core.draft import Draft
from foreword.core.state import State
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.model.cost import measure_draft
from foreword.model.linears import read_bytes
from foreword.model.model import Model

ROWS = (1, 2, 4, 8, 16, 32, 64)
SPLIT_STAGES = ("draft", "verify", "accept", "host")
SPLIT_TASKS, SPLIT_TOKENS = 3, 32
CPU_SQUARE, GPU_SQUARE = 1024, 8192  # rows and columns of the product that measures peak operations


def roofline(
    llm: LLM, methods: Sequence[str], benchmark: Benchmark, tasks: Sequence[Task], most_rows: int | None = None
) -> dict[str, Any]:
    """Measure the roofline. `methods`: our contenders of the benchmark, plain included. `most_rows`: its bound on rows."""
    model = llm.model.with_own_cache()
    context = int(median(len(task.ids) for task in tasks)) + benchmark.max_new_tokens // 2
    context = min(context, model.max_context - max(ROWS))
    try:
        peak = {"bytes_per_second": bandwidth(model.device), "operations_per_second": peak_operations(model)}
        passes = attempt(lambda: [_pass(model, rows, context, peak) for rows in ROWS])
        splits = {name: attempt(partial(_split, model, name, most_rows, tasks, context)) for name in methods}
    finally:
        model.release()
    return {
        **peak,
        "weight_bytes": read_bytes(model.hf),
        "context": context,
        "passes": passes,
        "knee": knee(passes) if isinstance(passes, list) else None,
        "methods": {name: _economy(benchmark, name, splits[name], passes) for name in methods},
        "split": splits,
    }


# Passes -------------------------------------------------------------------------------------------------------------------


def _pass(model: Model, rows: int, context: int, peak: dict[str, float]) -> dict[str, Any]:
    ms = milliseconds(Probe(model, rows, context).score, model.device, 30 if model.device.type == "cuda" else 4)
    size, work = bytes_of_pass(model, rows, context), operations_of_pass(model, rows, context)
    return {
        "rows": rows,
        "ms": ms,
        "bytes": size,
        "operations": work,
        "bandwidth_share": size / (ms / 1e3) / peak["bytes_per_second"],
        "operations_share": work / (ms / 1e3) / peak["operations_per_second"],
        "floor_ms": max(size / peak["bytes_per_second"], work / peak["operations_per_second"]) * 1e3,
    }


def operations_of_pass(model: Model, rows: int, context: int) -> int:
    """Count two per weight and row, and in attention four per element of a query and token that it sees."""
    config, stack = model.hf.config, model.layer_stack
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = sum(min(context, spec.window or context) + rows for spec in stack.attention_specs)
    return 2 * rows * (read_bytes(model.hf) // model.dtype.itemsize) + 4 * rows * config.num_attention_heads * width * seen


@torch.inference_mode()
def peak_operations(model: Model) -> float:
    """Return the best operations per second of a large square product in the model's dtype."""
    on_gpu = model.device.type == "cuda"
    size = GPU_SQUARE if on_gpu else CPU_SQUARE
    one = torch.ones(size, size, dtype=model.dtype, device=model.device)

    def product() -> torch.Tensor:
        return one @ one

    product()
    seconds = cuda_milliseconds(product, 10, best=True) / 1e3 if on_gpu else min(_seconds(product) for _ in range(5))
    return 2 * size**3 / seconds


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def knee(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """Find the knee by the cost of one more row: the slope of the curve over its last points."""
    last = [one for one in passes if one["rows"] >= max(ROWS) / 4]
    slope = float(np.polyfit([one["rows"] for one in last], [one["ms"] for one in last], 1)[0])
    rows = passes[0]["ms"] / slope if slope > 0 else None
    return {"rows": rows, "ms_per_row": slope, "beyond": rows is None or rows > passes[-1]["rows"]}


# Rounds -------------------------------------------------------------------------------------------------------------------


def _economy(benchmark: Benchmark, name: str, split: dict[str, Any], passes: Any) -> dict[str, Any]:
    """Return what a round costs in rounds of plain decoding, and how many tokens it must decide to break even."""
    own, plain = (_rounds(benchmark.of(one)) for one in (name, benchmark.base))
    if own is None or plain is None:
        return {"failed": "no answers of more than one round"}
    cost = own["seconds"] / plain["seconds"]
    drafted = own["drafted"]
    found = {
        "round_ms": own["seconds"] * 1e3,
        "round_cost": cost,
        "tokens_per_round": own["tokens"],
        "break_even_tokens_per_round": cost,
        "acceptance": own["kept"] / drafted if drafted else None,
        "break_even_acceptance": max(cost - 1, 0.0) / drafted if drafted else None,
    }
    if "verify" in split and isinstance(passes, list):
        bytes_per_second = passes[0]["bytes"] / (passes[0]["ms"] / 1e3) / passes[0]["bandwidth_share"]
        read = float(np.interp(1 + drafted, [one["rows"] for one in passes], [one["bytes"] for one in passes]))
        found["verify_bandwidth_share"] = read / (split["verify"] / 1e3) / bytes_per_second
    return found


def _rounds(timings: list[Timing]) -> dict[str, float] | None:
    """Return means over the rounds after the first one of each answer."""
    some = [t for t in timings if not t.failed and t.first_s is not None and t.rounds > 1]
    if not some:
        return None
    rounds = sum(t.rounds - 1 for t in some)
    every = sum(t.rounds for t in some)
    kept = sum(count * number for t in some for number, count in enumerate(t.kept))
    return {
        "seconds": sum(t.seconds - (t.first_s or 0.0) for t in some) / rounds,
        "tokens": sum(t.tokens - t.first_tokens for t in some) / rounds,
        "drafted": sum(t.drafted for t in some) / every,
        "kept": kept / every,
    }


def _split(model: Model, method: str, rows: int | None, tasks: Sequence[Task], context: int) -> dict[str, float]:
    """Return milliseconds of a round by stage."""
    request = DrafterRequest.of(method, rows=rows)
    _, drafter = request.resolve(model)
    most = min(max(len(task.ids) for task in tasks) + SPLIT_TOKENS + 1, model.max_context)
    engine = Engine(model, drafter, 1, most)
    if model.device.type == "cuda":
        return _captured_split(engine, request, context)
    watch = Stopwatch(engine)
    generate_answers(engine, tasks[:1], GenerationSettings(8))
    watch.spent.clear()
    answers = [
        answer
        for task in tasks[:SPLIT_TASKS]
        for answer in generate_answers(engine, [task], GenerationSettings(SPLIT_TOKENS))
    ]
    rounds = sum(len(answer.accepted) for answer in answers)
    return {stage: watch.spent.get(stage, 0.0) * 1e3 / max(rounds, 1) for stage in SPLIT_STAGES}


def _captured_split(engine: Engine, request: DrafterRequest, context: int) -> dict[str, float]:
    """Split a captured round. It cannot be timed inside, so its stages are timed alone; the remainder is acceptance."""
    model = engine.target
    tokens = min(96, engine.max_context // 2)
    timer = GenerationTimer(engine, min(context, engine.max_context - tokens - 1), tokens)
    with _rows_drafted(engine.drafter) as drafted:  # rounds run eagerly before they are captured
        timer.wall()
    timer.wall()
    wall, _ = timer.wall()
    device = timer.device_ms(30)
    rows = max(drafted, default=engine.drafter.shape.nodes)
    verify = milliseconds(Probe(model, rows, context).score, model.device, 30)
    _, fresh = request.resolve(model)
    draft = measure_draft(model, fresh).curve().at(1) * 1e3 if rows > 1 else 0.0
    accept = max(device - draft - verify, 0.0)
    return {"draft": draft, "verify": verify, "accept": accept, "host": max(wall - device, 0.0)}


@contextmanager
def _rows_drafted(drafter: Any) -> Iterator[list[int]]:
    """Record the rows of each draft; at some batch sizes drafts have fewer rows than the maximum."""
    rows: list[int] = []
    propose = drafter.propose

    def counting(state: State) -> Draft:
        draft: Draft = propose(state)
        rows.append(draft.nodes)
        return draft

    drafter.propose = counting
    try:
        yield rows
    finally:
        del drafter.propose  # uncovers the method of the class


class Stopwatch:
    """Seconds of an engine's steps on the CPU by stage: the drafter, the target's pass, the rest of a round, passes over
    prompts, and the host around them. A pass that the drafter runs counts as drafting.
    """

    def __init__(self, engine: Engine) -> None:
        self.spent: dict[str, float] = {}
        self.running: list[str] = []
        self._time_calls(engine, "step_for", {"": "host"})
        self._time_calls(engine.loop, "round", {"host": "accept"})
        self._time_calls(engine.drafter, "propose", {"accept": "draft"})
        self._time_calls(engine.drafter, "observe", {"accept": "draft"})
        self._time_calls(engine.target, "score", {"accept": "verify", "host": "prompt"})

    def _time_calls(self, of: Any, name: str, stages: dict[str, str]) -> None:
        """Time the calls of a method. `stages` maps the stage that calls it to the stage that the call counts as."""
        call = getattr(of, name)

        def timed(*given: Any, **more: Any) -> Any:
            outer = self.running[-1] if self.running else ""
            if outer not in stages:
                return call(*given, **more)
            stage = stages[outer]
            self.running.append(stage)
            started = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                seconds = time.perf_counter() - started
                self.running.pop()
                self.spent[stage] = self.spent.get(stage, 0.0) + seconds
                if outer:
                    self.spent[outer] = self.spent.get(outer, 0.0) - seconds

        setattr(of, name, timed)
