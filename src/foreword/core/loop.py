"""Loop: the interface of what runs rounds. Two classes implement it.

`engine/lockstep.py` drafts and verifies in turns; almost all methods use it. `engine/pipeline.py` runs tokens through a
looped target one after the other, for drafters that declare a `Pipelining`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from foreword.core.draft import Draft
from foreword.core.scores import Emission, Scores
from foreword.core.state import State

Constrain = Callable[[State, Draft], Draft]
"""Adds to a draft the tokens that grammars allow after each of its rows. It works on the host, and reads the draft there."""


@dataclass(frozen=True)
class Pipelining:
    """How tokens are pipelined through the repeats of a looped target. A token that has been through its group of layers
    once predicts the next one, which follows it while the first continues.

    `rechecks`: whether a token's prediction is checked again after every repeat, or after its first and its last only
    ("ends"). `gate`: the probability that a prediction must exceed before the last repeat; otherwise it is not used.
    """

    rechecks: Literal["every", "ends"] = "every"
    gate: float = 0.0


class Loop(Protocol):
    captured: bool
    """Whether rounds and prompt passes are recorded once and replayed, so that they come in few sizes."""

    reads_after: bool
    """Whether a drafter reads prompt rows after their pass and not within it, since it works on the host."""

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Copy the first `rows` cached rows of a slot to a slot whose next sequence begins with the same tokens."""

    def begin(self, state: State) -> None:
        """Sequences enter."""

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        """Show the drafter a chunk of their prompt."""

    def prompt_pass(self, state: State, chunk: Draft, read: Callable[[State, Draft], Scores | None]) -> Scores | None:
        """Run `read(state, chunk)`, a pass over prompt rows."""

    def has_pass(self, sequences: int, before: int, rows: int) -> bool:
        """Whether a pass over this many prompts and rows, after `before` cached tokens, does not have to be recorded."""

    def recorded(self, sequences: int, length: int) -> Any:
        """The graph that a round would replay for this many sequences of at most this length, if there is one."""

    def forget(self) -> None:
        """Drop what was recorded: weights or addresses have changed."""

    def round(self, state: State, constrain: Constrain | None = None) -> Emission:
        """Advance every sequence that is alive. In lockstep each gets a token or more, in a pipeline one or none.
        `constrain` is called with the draft before it is verified; None: no request of the round has a grammar."""

    def restart(self, slots: Sequence[int]) -> None:
        """Compute sequences from their roots again: their scratch rows were cleared."""

    def end(self, slots: Sequence[int]) -> bool | None:
        """Sequences leave. Return True if recorded rounds of this loop no longer do what it does."""


class InTurns(Loop, Protocol):
    """A loop whose round is `propose`, `check`, `decided`, so that the host may work between these, for a drafter or a
    grammar."""

    def propose(self, state: State) -> Draft:
        """Propose candidates after the root. In a pipeline the root alone is a draft."""

    def check(self, state: State, draft: Draft) -> Emission:
        """Verify, accept and commit a draft, and let the drafter observe."""

    def decided(self, state: State, emission: Emission) -> None:
        """The check is launched."""
