"""What the machine allows: bytes and operations of a pass by its rows, what share of the machine's peak it reaches, where
rows begin to cost, and what a method has to guess right in order to pay.

In: a loaded model, the benchmark of one text at a time, and a few of its tasks. Out: a plain dictionary for the report;
whatever fails is told where its figures would stand. The knee is where the rows of a pass, each at the price of a further
one, cost as much as a pass of one row: the reading of the weights no longer hides them. A method breaks even when a round
decides as many tokens as it costs in rounds of plain decoding.
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
from foreword.bench.contenders import Manner, Task, written
from foreword.bench.figures import Benchmark, Timing
from foreword.bench.passes import Probe, between_marks, bytes_of_pass, milliseconds
from foreword.bench.profile import Writing, attempt, bandwidth
from foreword.core.draft import Draft
from foreword.core.state import State
from foreword.drafters.resolve import Wanted
from foreword.engine.engine import Engine
from foreword.model.cost import measure_draft
from foreword.model.linears import read_bytes
from foreword.model.model import Model

ROWS = (1, 2, 4, 8, 16, 32, 64)
PARTS = ("draft", "verify", "accept", "host")
SPLIT_TEXTS, SPLIT_TOKENS = 3, 32
CPU_SQUARE, GPU_SQUARE = 1024, 8192  # rows of the product that peak operations are measured by


def roofline(
    llm: LLM, methods: Sequence[str], benchmark: Benchmark, tasks: Sequence[Task], most_rows: int | None = None
) -> dict[str, Any]:
    """`methods` are ours of the benchmark's contenders, plain among them; `most_rows` bounds passes as it did there."""
    model = llm.model.again()
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
    """Two for each weight and row, and in attention four for each number of a query and each token that it sees."""
    config, stack = model.hf.config, model.layer_stack
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = sum(min(context, sight.window or context) + rows for sight in stack.sights)
    return 2 * rows * (read_bytes(model.hf) // model.dtype.itemsize) + 4 * rows * config.num_attention_heads * width * seen


@torch.inference_mode()
def peak_operations(model: Model) -> float:
    """Operations a second of a large square product in the model's dtype, at best."""
    on_gpu = model.device.type == "cuda"
    size = GPU_SQUARE if on_gpu else CPU_SQUARE
    one = torch.ones(size, size, dtype=model.dtype, device=model.device)

    def product() -> torch.Tensor:
        return one @ one

    product()
    seconds = between_marks(product, 10, best=True) / 1e3 if on_gpu else min(_seconds(product) for _ in range(5))
    return 2 * size**3 / seconds


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def knee(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """By the cost of a further row, which is the slope of the curve over its last points."""
    last = [one for one in passes if one["rows"] >= max(ROWS) / 4]
    slope = float(np.polyfit([one["rows"] for one in last], [one["ms"] for one in last], 1)[0])
    rows = passes[0]["ms"] / slope if slope > 0 else None
    return {"rows": rows, "ms_per_row": slope, "beyond": rows is None or rows > passes[-1]["rows"]}


# Rounds -------------------------------------------------------------------------------------------------------------------


def _economy(benchmark: Benchmark, name: str, split: dict[str, Any], passes: Any) -> dict[str, Any]:
    """What a round costs in rounds of plain decoding, and what it must therefore decide."""
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
    """Means over the rounds behind the first one of each text."""
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
    """Milliseconds of a round, by what is done in it."""
    wanted = Wanted.of(method, rows=rows)
    _, drafter = wanted.on(model)
    most = min(max(len(task.ids) for task in tasks) + SPLIT_TOKENS + 1, model.max_context)
    engine = Engine(model, drafter, 1, most)
    if model.device.type == "cuda":
        return _captured_split(engine, wanted, context)
    watch = Stopwatch(engine)
    written(engine, tasks[:1], Manner(8))
    watch.spent.clear()
    answers = [answer for task in tasks[:SPLIT_TEXTS] for answer in written(engine, [task], Manner(SPLIT_TOKENS))]
    rounds = sum(len(answer.accepted) for answer in answers)
    return {part: watch.spent.get(part, 0.0) * 1e3 / max(rounds, 1) for part in PARTS}


def _captured_split(engine: Engine, wanted: Wanted, context: int) -> dict[str, float]:
    """A captured round cannot be stopped in the middle: its parts are measured alone, and what is left is accepting."""
    model = engine.target
    tokens = min(96, engine.max_context // 2)
    writing = Writing(engine, min(context, engine.max_context - tokens - 1), tokens)
    with _rows_drafted(engine.drafter) as drafted:  # rounds run as they are written before they are captured
        writing.wall()
    writing.wall()
    wall, _ = writing.wall()
    device = writing.device_ms(30)
    rows = max(drafted, default=engine.drafter.shape.nodes)
    verify = milliseconds(Probe(model, rows, context).score, model.device, 30)
    _, again = wanted.on(model)
    draft = measure_draft(model, again).curve().at(1) * 1e3 if rows > 1 else 0.0
    accept = max(device - draft - verify, 0.0)
    return {"draft": draft, "verify": verify, "accept": accept, "host": max(wall - device, 0.0)}


@contextmanager
def _rows_drafted(drafter: Any) -> Iterator[list[int]]:
    """What its drafts have meanwhile: at one batch size that may be less than they could have."""
    rows: list[int] = []
    propose = drafter.propose

    def heard(state: State) -> Draft:
        draft: Draft = propose(state)
        rows.append(draft.nodes)
        return draft

    drafter.propose = heard
    try:
        yield rows
    finally:
        del drafter.propose  # and its own is there again


class Stopwatch:
    """Seconds of an engine's steps on the CPU, each spent in one part: in the drafter, in the target's pass, in what is left
    of a round, in passes over prompts, and on the host around all of them. A pass that the drafter asks for is its own time.
    """

    def __init__(self, engine: Engine) -> None:
        self.spent: dict[str, float] = {}
        self.running: list[str] = []
        self._over(engine, "step_for", {"": "host"})
        self._over(engine.loop, "round", {"host": "accept"})
        self._over(engine.drafter, "propose", {"accept": "draft"})
        self._over(engine.drafter, "observe", {"accept": "draft"})
        self._over(engine.target, "score", {"accept": "verify", "host": "prompt"})

    def _over(self, of: Any, name: str, parts: dict[str, str]) -> None:
        """Time calls of a method; `parts` says what a call is where it is made within another part."""
        call = getattr(of, name)

        def timed(*given: Any, **more: Any) -> Any:
            outer = self.running[-1] if self.running else ""
            if outer not in parts:
                return call(*given, **more)
            part = parts[outer]
            self.running.append(part)
            started = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                seconds = time.perf_counter() - started
                self.running.pop()
                self.spent[part] = self.spent.get(part, 0.0) + seconds
                if outer:
                    self.spent[outer] = self.spent.get(outer, 0.0) - seconds

        setattr(of, name, timed)
