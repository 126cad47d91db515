"""Rounds and prompt passes as CUDA graphs: captured once per bucket, then replayed without Python or launches in between.

A bucket is what a captured round cannot change: how many sequences, how far attention looks, and which stages sampling
needs; a draft that is made on the host has its number of rows too, and so has a prompt pass, where nothing is sampled.
Everything else lives in buffers that stay where they are; only the slots' numbers, and such tokens, are copied in. The first
time in a bucket runs as it is written, which warms everything up and does real work; the second is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

import torch

from foreword.core.draft import Draft
from foreword.core.loop import InTurns, Loop
from foreword.core.sampling import Kind
from foreword.core.scores import Emission, Scores
from foreword.core.state import Lanes, State

LEAST_SPAN = 256
FEWEST_ROWS = 64  # of a captured prompt pass
MOST_TEXTS = 4  # in one

Bucket = tuple[int, int, Kind, int]
PromptBucket = tuple[int, int, int]
Answer = TypeVar("Answer")


@dataclass
class Captured(Generic[Answer]):
    """One bucket: the buffers that it reads, and the graph with what it leaves behind, once captured."""

    lanes: Lanes
    graph: torch.cuda.CUDAGraph | None = None
    answer: Answer | None = None
    draft: Draft | None = None  # that was given, or a prompt's rows; the graph reads its tree too, which is kept with it
    ids: tuple[int, ...] = ()  # the slots whose numbers were copied in last


class Replay:
    """Satisfies `core.Loop`: another loop's rounds, replayed; and so are passes over prompts."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.buckets: dict[Any, Captured[Emission]] = {}  # by Bucket, and by the rows of a draft that is given
        self.chunks: dict[PromptBucket, Captured[Scores | None]] = {}
        self.pool: Any = None  # memory that all graphs share

    def forget(self) -> None:
        """What was captured: rounds run as they are written before they are captured again. For weights that have changed:
        what is made of them, codes in eight bits for example, is made anew where a round runs, not where it is replayed."""
        self.buckets.clear()
        self.chunks.clear()
        self.pool = None  # it went with the last graph that had it

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
        return self._replayed(captured, state, self.loop.round)

    def prompt_pass(self, state: State, chunk: Draft, read: Callable[[State, Draft], Scores | None]) -> Scores | None:
        """`read(state, chunk)`. What it gives stays as it is until the next replay: any graph may write where it lies."""
        bucket = prompt_bucket(len(state.lanes.ids), state.lanes.span, chunk.nodes)
        return self._given(self.chunks, bucket, state, chunk, read)

    def has_pass(self, bucket: PromptBucket) -> bool:
        """Whether a pass over prompts is captured."""
        return bucket in self.chunks and self.chunks[bucket].graph is not None

    def _given(
        self,
        known: dict[Any, Captured[Answer]],
        bucket: tuple[Any, ...],
        state: State,
        draft: Draft,
        call: Callable[[State, Draft], Answer],
    ) -> Answer:
        """`call(state, draft)`, of a draft that comes from outside: it is copied to where the graph looks."""
        captured = known.get(bucket)
        if captured is None:
            captured = known[bucket] = Captured(_fixed_lanes(state.lanes, bucket[1]), draft=draft)
            return call(state.at(captured.lanes), draft)
        fixed = captured.draft
        assert fixed is not None
        fixed.tokens.copy_(draft.tokens)
        fixed.size.copy_(draft.size)
        return self._replayed(captured, state, lambda at: call(at, fixed))

    def _replayed(self, captured: Captured[Answer], state: State, call: Callable[[State], Answer]) -> Answer:
        if captured.ids != state.lanes.ids:
            captured.lanes.slots.copy_(state.slots)
            captured.ids = state.lanes.ids
        if captured.graph is None:
            # Of the host's numbers those of this round count: its sampling is what the bucket is captured for.
            lanes = replace(captured.lanes, ids=state.lanes.ids)
            self._capture(captured, lambda: call(state.at(lanes)))
        assert captured.graph is not None
        captured.graph.replay()
        return cast(Answer, captured.answer)

    def _capture(self, captured: Captured[Answer], call: Callable[[], Answer]) -> None:
        graph = torch.cuda.CUDAGraph()
        # Somebody else may be at work in another thread, a draft for example: that is no error of this capture.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            captured.answer = call()
        self.pool = self.pool or graph.pool()
        captured.graph = graph


class ReplayedCheck(Replay):
    """The same for drafts that are made on the host: what comes behind `propose` is replayed."""

    loop: InTurns

    def round(self, state: State) -> Emission:
        draft = self.loop.propose(state)
        emission = self._given(self.buckets, (*_bucket(state), draft.nodes), state, draft, self.loop.check)
        self.loop.decided(state, emission)
        return emission


def replayed(loop: Loop, part: Literal["round", "check", "nothing"]) -> Loop:
    """A loop whose rounds are replayed, as far as its drafter lets them: see `Drafter.captures`."""
    if part == "check":
        return ReplayedCheck(cast(InTurns, loop))
    return Replay(loop) if part == "round" else loop


def padded_rows(rows: int, chunk: int) -> int:
    """The sizes that captured prompt passes come in."""
    return min(max(1 << (rows - 1).bit_length(), FEWEST_ROWS), chunk)


def reach(span: int) -> int:
    """How far attention looks in a round that was captured for texts of such a length."""
    return max(1 << (span - 1).bit_length(), LEAST_SPAN) if span else 0


def prompt_bucket(texts: int, read: int, rows: int) -> PromptBucket:
    """Of a pass over as many rows of each prompt, of which so much was read before."""
    return texts, reach(read), rows


def _bucket(state: State) -> Bucket:
    return len(state.lanes.ids), reach(state.lanes.span), state.table.kind(state.lanes.ids), state.seen.data_ptr()


def _fixed_lanes(lanes: Lanes, span: int) -> Lanes:
    """The same slots in a buffer of their own, which later rounds of the bucket write theirs into."""
    return Lanes(lanes.slots.clone(), lanes.ids, span, changes=True)
