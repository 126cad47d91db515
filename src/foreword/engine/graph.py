"""The round as a CUDA graph: captured once per bucket, then replayed without Python or launches in between.

A bucket is what a captured round cannot change: how many sequences, how far attention looks, and which stages sampling
needs. Everything else lives in buffers that stay where they are; only the slots' numbers are copied in. The first round of
a bucket runs as it is written, which warms everything up and decides real tokens; the second is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foreword.core.draft import Draft
from foreword.core.loop import Loop
from foreword.core.sampling import Kind
from foreword.core.scores import Emission, Scores
from foreword.core.state import Lanes, State

SPAN_BUCKET = 256

Bucket = tuple[int, int, Kind, int]


@dataclass
class Captured:
    """One bucket: the buffer that names its slots, and the graph with what it leaves behind, once captured."""

    lanes: Lanes
    graph: torch.cuda.CUDAGraph | None = None
    emission: Emission | None = None


class Replay:
    """Satisfies `core.Loop`: another loop's rounds, replayed."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.buckets: dict[Bucket, Captured] = {}
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
        captured.lanes.slots.copy_(state.slots)
        if captured.graph is None:
            self._capture(captured, state)
        assert captured.graph is not None and captured.emission is not None
        captured.graph.replay()
        return captured.emission

    def _capture(self, captured: Captured, state: State) -> None:
        graph = torch.cuda.CUDAGraph()
        # Of the host's numbers those of this round count: its sampling is what the bucket is captured for.
        lanes = replace(captured.lanes, ids=state.lanes.ids)
        with torch.cuda.graph(graph, pool=self.pool):
            captured.emission = self.loop.round(state.at(lanes))
        self.pool = self.pool or graph.pool()
        captured.graph = graph


def _bucket(state: State) -> Bucket:
    span = -(-state.lanes.span // SPAN_BUCKET) * SPAN_BUCKET
    return len(state.lanes.ids), span, state.table.kind(state.lanes.ids), state.seen.data_ptr()


def _fixed_lanes(lanes: Lanes, span: int) -> Lanes:
    """The same slots in a buffer of their own, which later rounds of the bucket write theirs into."""
    return Lanes(lanes.slots.clone(), lanes.ids, span, changes=True)
