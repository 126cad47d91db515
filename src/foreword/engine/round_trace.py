"""RoundTrace: what one round drafted for a request, and what of it was accepted.

`engine/accept.py` collects it on the device, if a request of the round asks for it, and `engine/emit.py` makes it on the
host. It holds numbers and strings alone, so that it can go to another process. Text is added where the tokenizer is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foreword.core.draft import ORIGINS


@dataclass(frozen=True)
class RoundTrace:
    """The draft of a round as a tree of nodes, in the order of its rows. Node 0 is the root."""

    tokens: list[int]
    """The token id of each node."""

    parents: list[int]
    """The parent of each node. The root is its own."""

    origins: list[int]
    """Where each node comes from: 0 the root, 1 the drafter, 2 an earlier place of the sequence, 3 the prediction."""

    chances: list[float]
    """The probability of each node after its parent under the target, before penalties, temperature and filters."""

    path: list[int]
    """The accepted nodes, the root first. A node is accepted if it is the token that the target chooses there."""

    next: int
    """The target's own token after the path."""

    texts: list[str] = field(default_factory=list)
    """The text of each node's token. Empty where there is no tokenizer."""

    next_text: str = ""
    """The text of `next`."""

    def spelled(self, spell: Callable[[int], str]) -> RoundTrace:
        """Return the trace with texts. `spell`: returns the text of a token."""
        return replace(self, texts=[*map(spell, self.tokens)], next_text=spell(self.next))

    def to_dict(self) -> dict[str, Any]:
        """Return the trace for JSON, with the names of origins."""
        return asdict(self) | {"origins": [ORIGINS[origin] for origin in self.origins]}
