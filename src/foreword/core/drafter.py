"""Drafter: the promise a method makes. One method is required, `propose`; the rest defaults to nothing.

The engine calls, for sequences that `state` is a window on: `begin` when they enter, `read` for each chunk of their
prompt that `needs.prompt` asks for, then `propose` and `observe` once a round, and `end` when they leave. All sequences
of a call advance together, in tensors. State kept from `observe` to `propose` lives in buffers made in `bind`, indexed by
slot and written in place, so that a captured round replays the right addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from foreword.core.draft import Draft, Shape
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.core.vocabulary import Words


class Drafter:
    paper: ClassVar[str] = ""
    """Where the method comes from."""

    learns: ClassVar[bool] = False
    """Drafts depend on other sequences too, so a fresh drafter may draft differently on the same text."""

    wants_cost: bool = False
    """Sizes its trees by `target.cost`, which is measured once per machine."""

    capturable: ClassVar[bool] = True
    """No host work inside `propose`, `observe` and `read`: a round, or a prompt pass, can be captured as one graph."""

    words: Words | None = None
    """Tokens that it guesses among, where it asks the target's head for guesses: all, until some are chosen."""

    needs: Needs = Needs()
    shape: Shape = Shape()

    def bind(self, target: Target, slots: int) -> None:
        """Allocate for `slots` sequences, settle `shape` and `needs`, and refuse here what cannot work."""

    def begin(self, state: State) -> None:
        """Sequences enter. The first `state.length` tokens of each are those the slot already held (0 for a fresh
        text): a drafter with a cache of its own rewinds it to that length."""

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        """Prompt rows went by, as a chain of `chunk.size` rows each; they are committed already."""

    def propose(self, state: State) -> Draft:
        """Candidates after the root."""
        raise TypeError(f"{type(self).__name__} does not say what it proposes: a drafter needs `propose`")

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        """What became of a draft; it may be smaller than what `propose` gave. The accepted rows are committed."""

    def sketch(self, lane: int) -> dict[str, Any]:
        """How the last draft came about, where that is more than its tree: `nodes`, each with its token, the root first, and
        `edges`, each with start, goal, chance and whether it is an alias. For `Traced`, so it may ask the device."""
        return {}

    def end(self, slots: Sequence[int]) -> None:
        """Sequences leave."""

    def close(self) -> None:
        """Nobody writes with it any more, unless it is bound again: what works beside the target ends."""
