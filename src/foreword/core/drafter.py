"""Drafter: the promise a method makes. One method is required, `propose`; the rest defaults to nothing.

The engine calls, for sequences that `state` is a window on: `begin` when they enter, `read` for each chunk of their
prompt that `needs.prompt` asks for, then `propose`, `observe` and `decided` once a round, and `end` when they leave. All
sequences of a call advance together, in tensors. State kept from `observe` to `propose` lives in buffers made in `bind`,
indexed by slot and written in place, so that a captured round replays the right addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from foreword.core.draft import Draft, Shape
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Emission, Scores
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

    captures: ClassVar[Literal["round", "check", "nothing"]] = "round"
    """What of a round can be captured as one graph. "round": all of it, and prompt passes with `read` in them; there is no
    host work. "check": all behind `propose`, which works on the host, as `read` and `decided` may but `observe` may not;
    what `propose` gives is copied to where the graph looks. "nothing": `observe` works on the host too."""

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
        """Prompt rows went by, as a chain of `chunk.size` rows each; they are committed already. Nothing is sampled here: a
        captured pass serves texts of any sampling."""

    def propose(self, state: State) -> Draft:
        """Candidates after the root."""
        raise TypeError(f"{type(self).__name__} does not say what it proposes: a drafter needs `propose`")

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        """What became of a draft; it may be smaller than what `propose` gave. The accepted rows are committed."""

    def decided(self, state: State, emission: Emission) -> None:
        """The round is on its way; `emission` is what it decides, on the device. Where "check" is captured this is called
        behind the graph, and a drafter on the host learns here what it goes on from: `emission.fetched()`, and an event."""

    def sketch(self, lane: int) -> dict[str, Any]:
        """How the last draft came about, where that is more than its tree: `nodes`, each with its token, the root first, and
        `edges`, each with start, goal, chance and whether it is an alias. For `Traced`, so it may ask the device."""
        return {}

    def end(self, slots: Sequence[int]) -> None:
        """Sequences leave."""

    def close(self) -> None:
        """Nobody writes with it any more, unless it is bound again: what works beside the target ends."""
