"""A drafter that records every call to another one, and checks on what it recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from doubles.models import CONTEXT
from doubles.reference import full_sequence, truth
from doubles.states import sequences_of
from doubles.trees import paths_of
from foreword.core.draft import Draft
from foreword.core.drafter import Drafter
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.engine.request import Request


@dataclass
class Seen:
    """One call to a drafter: the sequences at that time, root included, and the arguments."""

    sequences: list[list[int]]
    draft: Draft
    scores: Scores = field(default_factory=Scores)
    accepted: Accepted | None = None
    slots: tuple[int, ...] = ()


class Recorder(Drafter):
    """Wraps another drafter and records every call. It may ask the target for more than the other needs."""

    paper = "-"

    def __init__(self, inner: Drafter, needs: Needs | None = None) -> None:
        self.inner, self.asked = inner, needs
        self.proposed: list[Seen] = []
        self.read_calls: list[Seen] = []
        self.observed: list[Seen] = []
        self.began: list[tuple[int, ...]] = []
        self.ended: list[int] = []

    def bind(self, target: Target, slots: int) -> None:
        self.inner.prepare(target, slots)
        self.shape, self.needs, self.pipelining = self.inner.shape, self.asked or self.inner.needs, self.inner.pipelining
        self.predicts, self.copies = self.inner.predicts, self.inner.copies

    def copy(self, source: int, slot: int, rows: int) -> None:
        self.inner.copy(source, slot, rows)

    def begin(self, state: State) -> None:
        self.began.append(state.batch.ids)
        self.inner.begin(state)

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        self.read_calls.append(Seen(sequences_of(state), chunk, scores, slots=state.batch.ids))
        self.inner.read(state, chunk, scores)

    def propose(self, state: State) -> Draft:
        draft = self.inner.propose(state)
        self.proposed.append(Seen(sequences_of(state), draft, slots=state.batch.ids))
        return draft

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        self.observed.append(Seen(sequences_of(state), draft, scores, accepted, state.batch.ids))
        self.inner.observe(state, draft, scores, accepted)

    def decided(self, state: State, emission: Emission) -> None:
        self.inner.decided(state, emission)

    def end(self, slots: Sequence[int]) -> bool | None:
        self.ended += slots
        return self.inner.end(slots)


def drafts_of(seen: Seen) -> list[tuple[list[int], list[int]]]:
    """Return the valid tokens and parents of each sequence."""
    parent = seen.draft.tree.parent.expand_as(seen.draft.tokens)
    return [
        (seen.draft.tokens[index, :size].tolist(), parent[index, :size].tolist())
        for index, size in enumerate(seen.draft.size.tolist())
    ]


def check_yield(recorder: Recorder, model: PreTrainedModel, asked: Iterable[Request]) -> None:
    """Check that every round accepted the deepest draft row that agrees with the truth, and no more."""
    written = [(list(one.prompt), truth(model, one), full_sequence(model, one, beyond=CONTEXT)) for one in asked]
    assert len(recorder.proposed) == len(recorder.observed)
    for before, after in zip(recorder.proposed, recorder.observed, strict=True):
        assert after.accepted is not None
        for index, sequence in enumerate(before.sequences):
            left, ahead = next(
                (len(prompt) + len(true) - len(sequence), tuple(full[len(sequence) :]))
                for prompt, true, full in written
                if full[: len(sequence)] == sequence
            )
            right = [len(path) for path in paths_of(before.draft, index) if ahead[: len(path)] == path]
            assert int(after.accepted.count[index]) == min(max(right) + 1, left), (sequence, paths_of(before.draft, index))
