"""Rounds and prompt passes as CUDA graphs: captured once per bucket, then replayed without Python or launches in between.

A bucket is what a captured round cannot change: how many sequences, how far attention looks, and which stages sampling
needs; a prompt pass has its number of rows too. Everything else lives in buffers that stay where they are; only the slots'
numbers, where they are others than last time, and a prompt's tokens are copied in. The first time in a bucket runs as it is
written, which warms everything up and does real work; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from foreword.core.draft import Draft
from foreword.core.loop import Loop
from foreword.core.sampling import Kind
from foreword.core.scores import Emission, Scores
from foreword.core.state import Lanes, State

SPAN_BUCKET = 256
FEWEST_ROWS = 64  # of a captured prompt pass
MOST_TEXTS = 4  # in one: with more of them the device has work enough while the host launches it

Bucket = tuple[int, int, Kind, int]
Answer = TypeVar("Answer")


@dataclass
class Captured(Generic[Answer]):
    """One bucket: the buffers that it reads, and the graph with what it leaves behind, once captured."""

    lanes: Lanes
    graph: torch.cuda.CUDAGraph | None = None
    answer: Answer | None = None
    chunk: Draft | None = None  # of a prompt pass; its tree is kept with it, since the graph reads that too
    ids: tuple[int, ...] = ()  # the slots whose numbers were copied in last


class Replay:
    """Satisfies `core.Loop`: another loop's rounds, replayed; and so are passes over prompts."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.buckets: dict[Bucket, Captured[Emission]] = {}
        self.chunks: dict[tuple[Bucket, int], Captured[Scores | None]] = {}
        self.pool: Any = None  # memory that all graphs share

    def begin(self, state: State) -> None:
        self.loop.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.loop.read(state, chunk, scores)

    def end(self, slots: Sequence[int]) -> None:
        self.loop.end(slots)

    def round(self, state: State) -> Emission:
        bucket = _bucket(state)
        captured = self.buckets.get(bucket)
        if captured is None:
            captured = self.buckets[bucket] = Captured(_fixed_lanes(state.lanes, bucket[1]))
            return self.loop.round(state.at(captured.lanes))
        emission = self._replayed(captured, state, self.loop.round)
        assert emission is not None
        return emission

    def prompt_pass(self, state: State, chunk: Draft, read: Callable[[State, Draft], Scores | None]) -> Scores | None:
        """`read(state, chunk)`. What it gives stays as it is until the next replay: any graph may write where it lies."""
        bucket = _bucket(state), chunk.nodes
        captured = self.chunks.get(bucket)
        if captured is None:
            captured = self.chunks[bucket] = Captured(_fixed_lanes(state.lanes, bucket[0][1]), chunk=chunk)
            return read(state.at(captured.lanes), chunk)
        fixed = captured.chunk
        assert fixed is not None
        fixed.tokens.copy_(chunk.tokens)
        fixed.size.copy_(chunk.size)
        return self._replayed(captured, state, lambda at: read(at, fixed))

    def _replayed(self, captured: Captured[Answer], state: State, call: Callable[[State], Answer]) -> Answer | None:
        if captured.ids != state.lanes.ids:
            captured.lanes.slots.copy_(state.slots)
            captured.ids = state.lanes.ids
        if captured.graph is None:
            # Of the host's numbers those of this round count: its sampling is what the bucket is captured for.
            current = state.at(replace(captured.lanes, ids=state.lanes.ids))
            self._capture(captured, lambda: call(current))
        assert captured.graph is not None
        captured.graph.replay()
        return captured.answer

    def _capture(self, captured: Captured[Answer], call: Callable[[], Answer]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            captured.answer = call()
        self.pool = self.pool or graph.pool()
        captured.graph = graph


def padded_rows(rows: int, chunk: int) -> int:
    """The sizes that captured prompt passes come in."""
    return min(max(1 << (rows - 1).bit_length(), FEWEST_ROWS), chunk)


def _bucket(state: State) -> Bucket:
    span = -(-state.lanes.span // SPAN_BUCKET) * SPAN_BUCKET
    return len(state.lanes.ids), span, state.table.kind(state.lanes.ids), state.seen.data_ptr()


def _fixed_lanes(lanes: Lanes, span: int) -> Lanes:
    """The same slots in a buffer of their own, which later rounds of the bucket write theirs into."""
    return Lanes(lanes.slots.clone(), lanes.ids, span, changes=True)
