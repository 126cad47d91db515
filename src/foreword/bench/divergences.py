"""Where a contender's output diverges from the base's, and whether that was a tie.

In: runs of blocks. Out: for each output of each contender `same`, `tie`, `different`, or why it could not be judged. The
caller passes the judge: `prove` has a referee, which this package does not import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foreword.bench.contenders import GenerationSettings
from foreword.bench.run import BlockRun, base_of
from foreword.core.sampling import Sampling

SAME, TIE, DIFFERENT = "same", "tie", "different"


@dataclass(frozen=True)
class Divergence:
    """Two tokens for one position of a sequence, the base's and another's, after `sequence[:place]`.

    `prompt`: how many tokens of the sequence are the prompt.
    """

    sequence: tuple[int, ...]
    prompt: int
    place: int
    sampling: Sampling
    base: int
    other: int


Judge = Callable[[Sequence[Divergence]], list[str]]
"""Returns TIE or DIFFERENT for each, or a sentence why it could not be judged, which counts as different."""


class Verdicts:
    """Verdicts on every output of every contender. Equal divergences of repeats and methods are judged once."""

    def __init__(self, block_runs: Iterable[BlockRun], settings: GenerationSettings, judge: Judge) -> None:
        self.settings = settings
        found: dict[Divergence, None] = {}
        for block_run in block_runs:
            for name in block_run.answers:
                found |= {one: None for one in self._divergences(block_run, name) if isinstance(one, Divergence)}
        self.judged = dict(zip(found, judge(list(found)) if found else [], strict=True))

    def of(self, block_run: BlockRun, contender: str) -> list[str]:
        return [self.judged[one] if isinstance(one, Divergence) else one for one in self._divergences(block_run, contender)]

    def _divergences(self, block_run: BlockRun, contender: str) -> list[Divergence | str]:
        settings = GenerationSettings(self.settings.max_new_tokens, block_run.place.temperature, self.settings.seed)
        found: list[Divergence | str] = []
        base = block_run.answers[base_of(list(block_run.answers))]
        for task, truth, answer in zip(block_run.tasks, base, block_run.answers[contender], strict=True):
            place = _first_difference(truth.tokens, answer.tokens)
            if answer.failed or truth.failed or place is None:
                found.append(SAME)
            elif place >= min(len(truth.tokens), len(answer.tokens)):
                found.append(DIFFERENT)  # equal tokens end at the same place: a different length is not rounding
            else:
                whole, given = (*task.ids, *truth.tokens), len(task.ids)
                tokens = truth.tokens[place], answer.tokens[place]
                found.append(Divergence(whole, given, given + place, settings.sampling(task), *tokens))
        return found


def _first_difference(base: Sequence[int], other: Sequence[int]) -> int | None:
    """Return where two sequences diverge, or the shorter one ends; None if they are equal."""
    common = min(len(base), len(other))
    return next((i for i in range(common) if base[i] != other[i]), common if len(base) != len(other) else None)
