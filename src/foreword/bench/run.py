"""The measuring loop: one for everybody. Contenders take turns on every prompt, so that whatever the machine does
meanwhile falls on all of them alike; the clock runs over the whole answer, prompt included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.bench.contenders import Contender
from foreword.errors import InputError
from foreword.text import Prompt, groups, loop_share


@dataclass(frozen=True)
class Timing:
    prompt: str
    group: str
    contender: str
    tokens: int
    rounds: int
    seconds: float
    prefill_s: float | None
    loop_share: float
    same_as_first: bool


@dataclass(frozen=True)
class Benchmark:
    contenders: tuple[str, ...]
    max_new_tokens: int
    timings: tuple[Timing, ...]

    def of(self, contender: str, wanted: Sequence[str] | None = None) -> list[Timing]:
        """A contender's timings, in all groups or in some."""
        return [t for t in self.timings if t.contender == contender and (wanted is None or t.group in wanted)]

    @property
    def base(self) -> str:
        """Whom the others are faster than: plain decoding, or the first where it does not run."""
        return "plain" if "plain" in self.contenders else self.contenders[0]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(timing.group for timing in self.timings))


def run(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> Benchmark:
    """Every contender on every prompt; the first one's tokens are what the others are compared with."""
    names = [contender.name for contender in contenders]
    if not prompts or not names or len(set(names)) < len(names):
        raise InputError(f"{len(prompts)} prompts for {names}; give at least one of each, and no contender twice")
    for contender in contenders:
        contender.write(prompts[0].first(), min(8, max_new_tokens))  # warm-up: the first pass of a process is slow
    timings: list[Timing] = []
    for done, (group, prompt) in enumerate(_grouped(prompts)):
        timings += _take_turns(contenders, done, group, prompt, max_new_tokens)
        if progress:
            progress(done + 1, len(prompts))
    return Benchmark(tuple(c.name for c in contenders), max_new_tokens, tuple(timings))


def _take_turns(contenders: Sequence[Contender], turn: int, group: str, prompt: Prompt, max_new_tokens: int) -> list[Timing]:
    """Who begins changes from prompt to prompt, so that nobody always follows the same neighbour."""
    answers = {}
    shift = turn % len(contenders)
    for contender in (*contenders[shift:], *contenders[:shift]):
        started = time.perf_counter()
        answer = contender.write(prompt.first(), max_new_tokens)
        answers[contender.name] = (answer, time.perf_counter() - started)
    truth = answers[contenders[0].name][0].tokens
    return [
        Timing(
            prompt=prompt.id,
            group=group,
            contender=name,
            tokens=len(answer.tokens),
            rounds=answer.rounds,
            seconds=seconds,
            prefill_s=answer.prefill_s,
            loop_share=loop_share(answer.tokens),
            same_as_first=answer.tokens == truth,
        )
        for name, (answer, seconds) in answers.items()
    ]


def _grouped(prompts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    return [(name, prompt) for name, members in groups(prompts).items() for prompt in members]
