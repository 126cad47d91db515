"""DRAFT: nothing. Tokens are pipelined through the repeats of a looped model: speculative pipelined execution.

A looped model applies one group of layers several times. After its first time through the group a token predicts the next
one, which enters the group while the first continues. So one call of the group, which reads its weights once, takes several
tokens further. The loop is `engine/pipeline.py`; this method declares it. Models that are not looped are refused: their
layers differ, so no call could serve tokens at different depths. Paper: SPEED (arXiv 2310.12072).
"""

from __future__ import annotations

from typing import Literal, get_args

from foreword.core.draft import Draft, Shape
from foreword.core.drafter import Drafter
from foreword.core.loop import Pipelining
from foreword.core.state import State
from foreword.core.target import Target
from foreword.errors import DrafterError, InputError

Check = Literal["every", "ends"]


class Speed(Drafter):
    paper = "SPEED, arXiv 2310.12072"
    copies = True

    def __init__(self, rows: int | None = None, check: Check = "every", gate: float = 0.0) -> None:
        """`check`: compare what a token predicts with the token that follows it after every repeat, or after its first and
        its last ("ends"). `gate`: use a prediction that is not final only if it is likelier than this. `rows` is allowed
        but has no effect: a round has one row per token in flight, at most as many as the model has repeats."""
        if check not in get_args(Check):
            raise InputError(f"speed: check is {check!r}; choose from {', '.join(get_args(Check))}")
        if not 0 <= gate < 1:
            raise InputError(f"speed: gate is {gate}; it is a probability, from 0 to less than 1")
        self.pipelining = Pipelining(check, gate)

    def bind(self, target: Target, slots: int) -> None:
        if target.repeats == 1:
            raise DrafterError(
                f"speed pipelines the repeats of a looped model, and {target.name} applies each of its layers once; make a "
                "looped model of it with `foreword train looped`, or use another method"
            )
        self.shape = Shape(nodes=target.repeats)

    def propose(self, state: State) -> Draft:
        """Draft nothing where it is not pipelined, as when its draft alone is timed."""
        return Draft.nothing(state.root)
