"""Time one verify pass: by replays of a captured graph on CUDA, by plain calls on the CPU.

In: a model, the rows of the pass, the tokens cached before it. Out: milliseconds, and the bytes that such a pass must
read. A probe gives the model a cache of its own, so an engine made for the model earlier can no longer be used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foreword.core.draft import Draft, Tree
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import Batch
from foreword.model.linears import read_bytes
from foreword.model.model import Model
from foreword.ops.cuda_graph import RecordedCall, record

WARM_UP = 3


class Probe:
    """A pass of one sequence: a tree of `rows` random tokens, two children each, after `context` cached tokens, with the
    pseudo rows that `needs` adds."""

    @torch.inference_mode()
    def __init__(self, model: Model, rows: int, context: int, needs: Needs | None = None) -> None:
        device = model.device
        self.model, self.needs = model, needs or Needs()
        cache = model.allocate(1, context, rows + self.needs.grafted_rows)
        cache.held.normal_()
        cache.length.fill_(context)
        self.batch = replace(Batch.of([0], context, device), changes=device.type == "cuda")  # as in captured rounds
        tokens = torch.randint(model.vocab_size, (1, rows), device=device)
        self.draft = Draft(tokens, Tree.forked(rows, device), torch.tensor([rows], device=device))

    @torch.inference_mode()
    def score(self) -> Scores:
        return self.model.score(self.batch, self.draft, self.needs)

    @torch.inference_mode()
    def walk(self) -> Tensor:
        """Run the pass without norm and head; return the rows after the last layer."""
        return self.model.score(self.batch, self.draft, Needs(hidden=True), logits="none").require_hidden()


DRIFT_ROWS, DRIFT_CONTEXT, DRIFT_REPEATS = (1, 16, 64), 256, 30


def drift_check(model: Model) -> dict[int, float]:
    """Clock drift check: time a few passes, by rows, to compare before and after a run. On CUDA only, where replays repeat
    precisely."""
    if model.device.type != "cuda":
        return {}
    own = model.with_own_cache()
    sizes = [rows for rows in DRIFT_ROWS if rows < own.max_context]
    context = min(DRIFT_CONTEXT, own.max_context - sizes[-1])
    try:
        return {rows: milliseconds(Probe(own, rows, context).score, own.device, DRIFT_REPEATS) for rows in sizes}
    finally:
        own.release()


def bytes_of_pass(model: Model, rows: int, context: int) -> int:
    """Return the bytes a pass must read: the weights of all linears, and the keys and values of every token a layer sees."""
    stack = model.layer_stack
    shape = stack.cache_shape()
    seen = sum(min(context, spec.window or context) + rows for spec in stack.attention_specs)
    return read_bytes(model.hf) + shape.bytes_per_row // shape.layers * seen


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call; on CUDA of replays of a captured graph, so that the host does not count."""
    if device.type == "cuda":
        return replay_milliseconds(record(call), repeats)
    call()
    return median(_seconds(call) for _ in range(repeats)) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def replay_milliseconds(graph: RecordedCall[Any], repeats: int) -> float:
    """Return the median milliseconds of a replay. Replays follow each other without a pause, so the host does not count."""
    for _ in range(WARM_UP):
        graph.replay()
    return cuda_milliseconds(graph.replay, repeats)


def cuda_milliseconds(call: Callable[[], object], repeats: int, best: bool = False) -> float:
    """Return milliseconds of a call on the current CUDA device, by events between calls: the median, or the fastest."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return min(times) if best else median(times)
