"""Rounds and prompt passes as CUDA graphs: recorded once per bucket, then replayed without Python or launches in between.

A bucket is what a recording fixes: the number of sequences, how far attention looks, and the stages that sampling needs.
If the host works within a round, for a drafter or a grammar, the check is a graph of its own. It also fixes the form of the
draft, as a prompt pass fixes its rows. All else lies in buffers that never move; slot numbers and drafts are copied in. The
first round of a bucket runs eagerly, which warms everything up and does real work; the second is recorded. The number of
buckets is bounded: the least recently used one makes room for a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from foreword.core.draft import Draft
from foreword.core.loop import Constrain, InTurns, Loop
from foreword.core.sampling_table import SamplingStages
from foreword.core.scores import Emission, Scores
from foreword.core.state import Batch, State
from foreword.ops.cuda_graph import RecordedCall
from foreword.ops.device import synchronize

LEAST_SPAN = 256
FEWEST_ROWS = 64  # rows of a recorded prompt pass
MOST_PROMPTS = 4  # prompts in a recorded pass
MOST_BUCKETS = 256  # of rounds, and as many of prompt passes

Bucket = tuple[int, int, SamplingStages, int]
PromptBucket = tuple[int, int, int]
Answer = TypeVar("Answer")


@dataclass
class GraphBucket(Generic[Answer]):
    """One bucket: the buffers that its graph reads, and the graph once it is recorded."""

    batch: Batch
    graph: RecordedCall[Answer] | None = None
    draft: Draft | None = None  # a draft from outside the graph, or a prompt's rows
    ids: tuple[int, ...] = ()  # the slots whose numbers were copied in last


class GraphedLoop:
    """Implements `core.Loop`: replays the rounds and prompt passes of another loop. A round with a grammar is two graphs:
    one proposes, one checks, and the host works between them."""

    captured = True
    reads_after = False

    def __init__(self, loop: InTurns, most: int = MOST_BUCKETS) -> None:
        """`most`: the number of buckets that are kept, of rounds, of proposals and of prompt passes each."""
        self.loop, self.most = loop, most
        # All are in the order of their last use, the most recent last.
        self.buckets: dict[Any, GraphBucket[Emission]] = {}  # by Bucket, and by the form of a draft from outside the graph
        self.proposals: dict[Bucket, GraphBucket[Draft]] = {}
        self.chunks: dict[PromptBucket, GraphBucket[Scores | None]] = {}
        self.pool: Any = None  # memory that all graphs share

    def forget(self) -> None:
        """Drop all graphs: each bucket runs eagerly once, then is recorded again. Needed when weights have changed: what is
        derived from them, int8 weights for example, is derived again in an eager round and not in a replay."""
        for known in (self.buckets, self.proposals, self.chunks):
            known.clear()
        self.pool = None  # it was freed with the last graph that used it

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.loop.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.loop.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.loop.read(state, chunk, scores)

    def restart(self, slots: Sequence[int]) -> None:
        self.loop.restart(slots)

    def end(self, slots: Sequence[int]) -> bool | None:
        if self.loop.end(slots):
            self._wait()
            self.forget()
        return None

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        if constrain is None:
            return self._alone(self.buckets, state, self.loop.round)
        return self._in_turns(state, self._alone(self.proposals, state, self._proposed), constrain)

    def _proposed(self, state: State) -> Draft:
        draft = self.loop.propose(state)
        draft.tree.lineage  # noqa: B018 - recorded with the draft, since it is read later
        return draft

    def _in_turns(self, state: State, draft: Draft, constrain: Constrain | None) -> Emission:
        """Run or replay the check of a draft, after the host has worked on it."""
        if constrain is not None:
            draft = constrain(state, draft)
        emission = self._with_draft(self.buckets, (*_bucket(state), draft.form), state, draft, self.loop.check)
        self.loop.decided(state, emission)
        return emission

    def prompt_pass(self, state: State, chunk: Draft, read: Callable[[State, Draft], Scores | None]) -> Scores | None:
        """Run or replay `read(state, chunk)`. Its answer is valid until the next replay: any graph may write to the same
        memory."""
        key = prompt_bucket(len(state.batch.ids), state.batch.span, chunk.nodes)
        return self._with_draft(self.chunks, key, state, chunk, read)

    def has_pass(self, sequences: int, before: int, rows: int) -> bool:
        key = prompt_bucket(sequences, before, rows)
        return key in self.chunks and self.chunks[key].graph is not None

    def recorded(self, sequences: int, length: int) -> RecordedCall[Emission] | None:
        """The graph of a round for `sequences` sequences of up to `length` tokens. Each replay decides new tokens."""
        known = [one for one in self.buckets.values() if one.graph and len(one.batch.ids) == sequences]
        fitting = [one for one in known if one.batch.span >= length]
        return min(fitting, key=lambda one: one.batch.span).graph if fitting else None

    def _alone(self, known: dict[Bucket, GraphBucket[Answer]], state: State, call: Callable[[State], Answer]) -> Answer:
        """Run or replay `call(state)`."""
        key = _bucket(state)
        bucket = _used(known, key)
        if bucket is None:
            bucket = self._add(known, key, GraphBucket(_fixed_batch(state.batch, key[1])))
            return call(state.at(bucket.batch))
        return self._replayed(bucket, state, call)

    def _with_draft(
        self,
        known: dict[Any, GraphBucket[Answer]],
        key: tuple[Any, ...],
        state: State,
        draft: Draft,
        call: Callable[[State, Draft], Answer],
    ) -> Answer:
        """Run or replay `call(state, draft)` for a draft from outside the graph: it is copied to where the graph reads
        it."""
        bucket = _used(known, key)
        if bucket is None:
            bucket = self._add(known, key, GraphBucket(_fixed_batch(state.batch, key[1]), draft=draft.clone()))
            return call(state.at(bucket.batch), draft)
        fixed = bucket.draft
        assert fixed is not None
        fixed.overwrite(draft)
        return self._replayed(bucket, state, lambda at: call(at, fixed))

    def _wait(self) -> None:
        """Wait until no graph runs any more, and no answer of one is on its way to the host."""
        if held := self._held:
            synchronize(held[0].batch.slots.device)

    @property
    def _held(self) -> list[GraphBucket[Any]]:
        return [*self.buckets.values(), *self.proposals.values(), *self.chunks.values()]

    def _add(self, known: dict[Any, GraphBucket[Answer]], key: Any, bucket: GraphBucket[Answer]) -> GraphBucket[Answer]:
        """Add a bucket, and drop the oldest ones if there are too many."""
        while len(known) >= self.most:
            self._drop(known)
        known[key] = bucket
        return bucket

    def _drop(self, known: dict[Any, GraphBucket[Answer]]) -> None:
        """Drop the least recently used bucket. Its graph may still run, and its answer may be on its way to the host, while
        the next recording takes over that memory. So wait for the device, as every recording does."""
        oldest = known.pop(next(iter(known)))
        if oldest.graph is not None:
            synchronize(oldest.batch.slots.device)
            if all(one.graph is None for one in self._held):
                self.pool = None  # it is freed with the last graph that uses it

    def _replayed(self, bucket: GraphBucket[Answer], state: State, call: Callable[[State], Answer]) -> Answer:
        if bucket.ids != state.batch.ids:
            bucket.batch.slots.copy_(state.slots)
            bucket.ids = state.batch.ids
        if bucket.graph is None:
            # The slots of this round decide which stages of sampling are recorded, not those of the eager round.
            batch = replace(bucket.batch, ids=state.batch.ids)
            self._record(bucket, lambda: call(state.at(batch)))
        assert bucket.graph is not None
        bucket.graph.replay()
        return bucket.graph.answer

    def _record(self, bucket: GraphBucket[Answer], call: Callable[[], Answer]) -> None:
        recorded = RecordedCall(call, self.pool)
        self.pool = self.pool or recorded.graph.pool()
        bucket.graph = recorded


class GraphedCheck(GraphedLoop):
    """The same for drafts that are made on the host: everything after `propose` is replayed."""

    reads_after = True

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        return self._in_turns(state, self.loop.propose(state), constrain)


def graphed(loop: InTurns, captures: Literal["round", "check", "nothing"]) -> Loop:
    """Wrap a loop so that its rounds are replayed, as far as its drafter allows: see `Drafter.captures`."""
    if captures == "check":
        return GraphedCheck(loop)
    return GraphedLoop(loop) if captures == "round" else loop


def padded_rows(rows: int, chunk: int) -> int:
    """Return the number of rows that a recorded prompt pass is padded to: one of a few sizes."""
    return min(max(1 << (rows - 1).bit_length(), FEWEST_ROWS), chunk)


def reach(span: int) -> int:
    """Return how far attention looks in a round that is recorded for sequences of `span` tokens."""
    return max(1 << (span - 1).bit_length(), LEAST_SPAN) if span else 0


def prompt_bucket(sequences: int, before: int, rows: int) -> PromptBucket:
    """Return the bucket of a pass over `rows` rows of each prompt, after `before` cached tokens."""
    return sequences, reach(before), rows


def _used(known: dict[Any, GraphBucket[Answer]], key: Any) -> GraphBucket[Answer] | None:
    """Return the bucket of a key, and make it the most recently used one."""
    bucket = known.pop(key, None)
    if bucket is not None:
        known[key] = bucket
    return bucket


def _bucket(state: State) -> Bucket:
    return len(state.batch.ids), reach(state.batch.span), state.table.kind(state.batch.ids), state.seen.data_ptr()


def _fixed_batch(batch: Batch, span: int) -> Batch:
    """Copy the slots to a buffer of their own, which later rounds of the bucket overwrite with theirs."""
    return Batch(batch.slots.clone(), batch.ids, span, changes=True)
