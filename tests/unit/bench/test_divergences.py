"""Where texts part, who is asked about it, and what becomes of the answer."""

from collections.abc import Callable
from typing import Any

from foreword.bench import Contender, Divergence, Manner, Verdicts, timings
from foreword.bench.divergences import DIFFERENT, SAME, TIE
from foreword.bench.figures import benchmarks, rows
from foreword.bench.run import Found
from foreword.text import Prompt

PROMPTS = [Prompt("0", "qa", ["hello"]), Prompt("1", "qa", ["words"])]


def judged(found: Found, say: Callable[[Divergence], str]) -> tuple[Verdicts, list[Divergence]]:
    asked: list[Divergence] = []

    def judge(divergences: Any) -> list[str]:
        asked.extend(divergences)
        return [say(one) for one in divergences]

    return Verdicts(found.heats.values(), Manner(16), judge), asked


def test_each_parting_is_judged_once(stub: Callable[..., Contender], race: Any, words: Any) -> None:
    contenders = [stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9]), stub("b", [5, 6, 9, 9]), stub("c", [5, 6, 7, 8])]
    found = race(contenders, PROMPTS, repeats=2)
    verdicts, asked = judged(found, lambda one: TIE)
    assert len(asked) == 2  # one for each prompt: a and b part alike, and so do the repeats
    ids = tuple(words.encode("hello"))
    assert asked[0] == Divergence((*ids, 5, 6, 7, 8), len(ids), len(ids) + 2, Manner(16).sampling(_task(found)), 7, 9)
    heat = next(iter(found.heats.values()))
    assert [verdicts.of(heat, name) for name in heat.answers] == [[SAME], [TIE], [TIE], [SAME]]


def _task(found: Found) -> Any:
    return next(iter(found.heats.values())).tasks[0]


def test_a_text_that_merely_ends_elsewhere_is_another_text(stub: Callable[..., Contender], race: Any) -> None:
    found = race([stub("plain", [5, 6, 7, 8]), stub("short", [5, 6, 7])], PROMPTS)
    verdicts, asked = judged(found, lambda one: TIE)
    assert not asked and verdicts.of(next(iter(found.heats.values())), "short") == [DIFFERENT]


def test_verdicts_reach_the_rows(stub: Callable[..., Contender], race: Any) -> None:
    found = race([stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9]), stub("b", [4, 6, 9])], PROMPTS)
    verdicts, _ = judged(found, lambda one: TIE if one.other == 9 else DIFFERENT)
    _, a, b = rows(benchmarks(timings(found.heats.values(), verdicts), 16, {})[0])
    assert (a.ties, a.differing, a.identical) == (2, 0, 0) and a.speedup is not None
    assert (b.ties, b.differing, b.refused) == (0, 2, "other text") and b.speedup is None


def test_what_cannot_be_judged_is_no_tie(stub: Callable[..., Contender], race: Any) -> None:
    found = race([stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9])], PROMPTS)
    verdicts, _ = judged(found, lambda one: "no memory for float64")
    a = rows(benchmarks(timings(found.heats.values(), verdicts), 16, {})[0])[1]
    assert a.speedup is None and "no memory for float64" in a.refused


def test_what_is_written_down(stub: Callable[..., Contender], race: Any) -> None:
    looping = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    found = race([stub("plain", looping, 16), stub("same", looping, 4)], PROMPTS)
    plain, same, *_ = timings(found.heats.values(), judged(found, lambda one: TIE)[0])
    assert (same.tokens, same.rounds, same.first_s, same.first_tokens, same.loop_share) == (16, 4, 0.25, 4, 0.5)
    assert (same.drafted, same.kept, same.identical, same.seconds > 0) == (12, [0, 0, 0, 4], 1, True)
    assert (plain.prompt, plain.group, plain.suite, plain.temperature) == ("0", "qa", "mine", 0.0)
