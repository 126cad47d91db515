"""Where a contender's text leaves the base's, and whether that was a tie.

In: heats. Out: for each text of each contender, `same`, `tie`, `different`, or why nobody could tell. Who decides is the
caller's affair: `prove` has a referee, which this room does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foreword.bench.contenders import Manner
from foreword.bench.run import Heat, base_of
from foreword.core.sampling import Sampling

SAME, TIE, DIFFERENT = "same", "tie", "different"


@dataclass(frozen=True)
class Parting:
    """Two tokens for one place of a text: the base's and another's, after `text[:place]`; the first `prompt` were given."""

    text: tuple[int, ...]
    prompt: int
    place: int
    sampling: Sampling
    base: int
    other: int


Judge = Callable[[Sequence[Parting]], list[str]]
"""TIE or DIFFERENT for each; or in other words why it could not be judged, which is no tie either."""


class Verdicts:
    """On every text of every contender. Equal partings, which repeats and methods often have, are judged once."""

    def __init__(self, heats: Iterable[Heat], manner: Manner, judge: Judge) -> None:
        self.manner = manner
        found: dict[Parting, None] = {}
        for heat in heats:
            for name in heat.answers:
                found |= {one: None for one in self._partings(heat, name) if isinstance(one, Parting)}
        self.judged = dict(zip(found, judge(list(found)) if found else [], strict=True))

    def of(self, heat: Heat, contender: str) -> list[str]:
        return [self.judged[one] if isinstance(one, Parting) else one for one in self._partings(heat, contender)]

    def _partings(self, heat: Heat, contender: str) -> list[Parting | str]:
        manner = Manner(self.manner.max_new_tokens, heat.place.temperature, self.manner.seed)
        found: list[Parting | str] = []
        base = heat.answers[base_of(list(heat.answers))]
        for task, truth, answer in zip(heat.tasks, base, heat.answers[contender], strict=True):
            place = _first_difference(truth.tokens, answer.tokens)
            if answer.failed or truth.failed or place is None:
                found.append(SAME)
            elif place >= min(len(truth.tokens), len(answer.tokens)):
                found.append(DIFFERENT)  # the tokens before are the same, so where a text ends is no matter of rounding
            else:
                whole, behind = (*task.ids, *truth.tokens), len(task.ids)
                tokens = truth.tokens[place], answer.tokens[place]
                found.append(Parting(whole, behind, behind + place, manner.sampling(task), *tokens))
        return found


def _first_difference(base: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part, or the shorter one ends."""
    common = min(len(base), len(other))
    return next((i for i in range(common) if base[i] != other[i]), common if len(base) != len(other) else None)
