"""Drafter: the interface of a drafting method. Only `propose` and a `shape` are needed; all else does nothing by default.

Before it serves, `build` makes its weights once, and `bind` makes its buffers, again for each engine. The engine then calls
`begin` when sequences enter, `read` for each chunk of their prompt that `needs.prompt` asks for, `propose`, `observe` and
`decided` once per round, and `end` when they leave. `state` says which sequences a call is about; they advance together, as
batch rows of tensors. What a drafter keeps from `observe` to `propose` lies in its buffers, indexed by slot and written in
place, so that a recorded round reads the right addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from foreword.core.draft import Draft, Shape
from foreword.core.loop import Pipelining
from foreword.core.needs import Needs
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State
from foreword.core.target import Target
from foreword.core.trainable import DraftVocabulary


class Drafter:
    paper: ClassVar[str] = ""
    """The paper that the method comes from."""

    learns: ClassVar[bool] = False
    """Drafts depend on other sequences too, so a new drafter may draft differently for the same sequence."""

    wants_cost: bool = False
    """It sizes its trees by `target.cost`, which is measured once per machine."""

    predicts: bool = False
    """It looks up candidates in the text that a request predicts: `prediction` of the settings."""

    captures: ClassVar[Literal["round", "check", "nothing"]] = "round"
    """The part of a round that can be recorded as one graph. "round": all of it, and prompt passes including `read`; then no
    method works on the host. "check": everything after `propose`. Then `propose`, `read` and `decided` may work on the host,
    and `observe` may not; the draft is copied to where the graph reads it. "nothing": `observe` works on the host too."""

    copies: bool = False
    """A sequence may start from rows that another slot holds: `copy` takes over what the drafter keeps of them. False: the
    engine lets the prompt be read."""

    vocabulary: DraftVocabulary | None = None
    """The draft vocabulary: the tokens it may propose, if candidates come from the target's head. None: all tokens."""

    pipelining: Pipelining | None = None
    """Pipeline tokens through the repeats of a looped target. Then `propose` is not called, `observe` sees the root alone as
    a draft, and `shape` has a node for every token that may be in flight. None: rounds draft and verify."""

    needs: Needs = Needs()
    shape: Shape = Shape()

    built: bool = False
    """Whether `build` was called. `prepare` keeps it."""

    @property
    def scratch(self) -> int:
        """How many scratch rows the target's cache needs: for the pass that verifies, or for passes while it drafts."""
        return max(self.shape.nodes + self.needs.grafted_rows, self.needs.scratch)

    def build(self, target: Target) -> None:
        """Make the weights for a target: `module`, and what its sizes depend on. Called once, before the first `bind`."""

    def bind(self, target: Target, slots: int) -> None:
        """Make buffers for `slots` sequences, settle `shape` and `needs`, and refuse here what cannot work. Another engine
        may call it again: it makes no weights."""

    def isolate(self) -> None:
        """Keep tokens of one conversation from the drafts of others, whose speed would tell of them. Called before
        `bind`."""

    def prepare(self, target: Target, slots: int) -> None:
        """Build it, unless it is built already, and bind it. Callers that need a drafter use this; methods do not override
        it."""
        if not self.built:
            self.build(target)
            self.built = True
        self.bind(target, slots)

    def copy(self, source: int, slot: int, rows: int) -> None:
        """Take over what is kept of the first `rows` tokens of a sequence: its slot is `source`, and it may still run. Then
        `begin` is called for `slot`. Only if `copies`."""

    def begin(self, state: State) -> None:
        """Sequences enter. The slot already holds the first `state.length` tokens of each (0 for a new sequence): a drafter
        with a cache of its own rewinds it to that length."""

    def read(self, state: State, chunk: Draft, scores: Scores) -> None:
        """See a chunk of the prompt, as a chain of `chunk.size` rows per sequence; the rows are committed already. Do not
        sample here: a recorded pass serves sequences of any sampling."""

    def propose(self, state: State) -> Draft:
        """Propose candidates after the root."""
        raise TypeError(f"{type(self).__name__} does not say what it proposes: a drafter needs `propose`")

    def observe(self, state: State, draft: Draft, scores: Scores, accepted: Accepted) -> None:
        """See how a draft was scored and what was accepted. It may have fewer rows than `propose` gave. Accepted rows are
        committed."""

    def decided(self, state: State, emission: Emission) -> None:
        """See what the launched round decides: `emission`, on the device. If `captures` is "check", this is called after the
        graph. A drafter on the host learns here where its sequences continue: by `emission.fetched()` and an event."""

    def sketch(self, index: int) -> dict[str, Any]:
        """Describe how the last draft of batch row `index` was made, if its tree does not show that: `nodes`, each with its
        token, the root first, and `edges`, each with start, goal, probability and whether it is an alias. It is for
        `Traced`, so it may read from the device."""
        return {}

    def end(self, slots: Sequence[int]) -> bool | None:
        """Sequences leave. This runs on the host, outside recorded rounds. Return True if something changed that a recorded
        round has fixed, such as the layers that a draft runs: then recorded rounds are dropped."""
        return None

    def close(self) -> None:
        """End what runs alongside the target. The drafter is not used any more, unless it is bound again."""
