"""The referee of `prove` for the outputs of `bench`. The two packages meet only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.errors import ForewordError

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.bench.divergences import Divergence, Judge
    from foreword.prove import Case, Ruling


def referee(llm: LLM, folder: Path, progress: Callable[[str, int, int], None]) -> Judge:
    """Return a function that tells ties from bugs. If it cannot judge, it says why for every divergence: none is a tie then.

    Passes of a benchmark have more shapes than the referee replays, and baselines have their own, so it allows a larger
    error than in a proof.
    """
    from foreword.bench.divergences import DIFFERENT, TIE  # noqa: PLC0415  imports torch
    from foreword.prove import Case, Referee  # noqa: PLC0415  imports torch

    def judge(divergences: Sequence[Divergence]) -> list[str]:
        cases = [Case(one.sequence, one.prompt, one.place, one.sampling, one.base, one.other) for one in divergences]
        rulings: dict[Case, Ruling] = {}
        try:
            for found in Referee(llm.model, folder).judge(cases, wide=True):
                rulings |= found
                progress("judging differences", len(rulings), len(cases))
        except (ForewordError, RuntimeError) as error:  # RuntimeError: a float64 pass runs out of memory
            return [" ".join(str(error).split())] * len(cases)
        return [TIE if rulings[case].verdict == "tie" else DIFFERENT for case in cases]

    return judge
