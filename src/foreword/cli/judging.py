"""The referee of `prove` for the texts of `bench`: two rooms that meet only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.errors import ForewordError

if TYPE_CHECKING:
    from foreword.api import LLM
    from foreword.bench.partings import Judge, Parting
    from foreword.prove import Case, Ruling


def referee(llm: LLM, folder: Path, progress: Callable[[str, int, int], None]) -> Judge:
    """Tells ties from differences. What it cannot judge it says why, for every parting: none of them is a tie then."""
    from foreword.bench.partings import DIFFERENT, TIE  # noqa: PLC0415  imports torch
    from foreword.prove import Case, Referee  # noqa: PLC0415  imports torch

    def judge(partings: Sequence[Parting]) -> list[str]:
        cases = {one: Case(one.text, one.prompt, one.place, one.sampling, one.base, one.other) for one in partings}
        rulings: dict[tuple[bool, Case], Ruling] = {}
        judging = Referee(llm.model, folder)
        try:
            for foreign in (False, True):
                some = [case for one, case in cases.items() if one.foreign is foreign]
                for found in judging.judge(some, foreign):
                    rulings |= {(foreign, case): ruling for case, ruling in found.items()}
                    progress("judging differences", len(rulings), len(cases))
        except ForewordError as error:
            return [str(error)] * len(partings)
        return [TIE if rulings[one.foreign, cases[one]].verdict == "tie" else DIFFERENT for one in partings]

    return judge
