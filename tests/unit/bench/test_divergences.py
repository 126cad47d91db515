"""Where outputs diverge, what the judge is asked, and what becomes of its verdicts."""

from collections.abc import Callable
from typing import Any

from foreword.bench import Contender, Divergence, GenerationSettings, Verdicts, timings
from foreword.bench.divergences import DIFFERENT, SAME, TIE
from foreword.bench.figures import benchmarks, rows
from foreword.bench.run import RunResults
from foreword.text import Prompt

PROMPTS = [Prompt("0", "qa", ["hello"]), Prompt("1", "qa", ["tokenizer"])]


def judged(found: RunResults, say: Callable[[Divergence], str]) -> tuple[Verdicts, list[Divergence]]:
    asked: list[Divergence] = []

    def judge(divergences: Any) -> list[str]:
        asked.extend(divergences)
        return [say(one) for one in divergences]

    return Verdicts(found.block_runs.values(), GenerationSettings(16), judge), asked


def test_each_divergence_is_judged_once(stub: Callable[..., Contender], measure: Any, tokenizer: Any) -> None:
    contenders = [stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9]), stub("b", [5, 6, 9, 9]), stub("c", [5, 6, 7, 8])]
    found = measure(contenders, PROMPTS, repeats=2)
    verdicts, asked = judged(found, lambda one: TIE)
    assert len(asked) == 2  # one per prompt: a and b diverge alike, and so do the repeats
    ids = tuple(tokenizer.encode("hello"))
    assert asked[0] == Divergence(
        (*ids, 5, 6, 7, 8), len(ids), len(ids) + 2, GenerationSettings(16).sampling(_task(found)), 7, 9
    )
    block_run = next(iter(found.block_runs.values()))
    assert [verdicts.of(block_run, name) for name in block_run.answers] == [[SAME], [TIE], [TIE], [SAME]]


def _task(found: RunResults) -> Any:
    return next(iter(found.block_runs.values())).tasks[0]


def test_an_output_that_only_ends_elsewhere_is_different(stub: Callable[..., Contender], measure: Any) -> None:
    found = measure([stub("plain", [5, 6, 7, 8]), stub("short", [5, 6, 7])], PROMPTS)
    verdicts, asked = judged(found, lambda one: TIE)
    assert not asked and verdicts.of(next(iter(found.block_runs.values())), "short") == [DIFFERENT]


def test_verdicts_reach_the_rows(stub: Callable[..., Contender], measure: Any) -> None:
    found = measure([stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9]), stub("b", [4, 6, 9])], PROMPTS)
    verdicts, _ = judged(found, lambda one: TIE if one.other == 9 else DIFFERENT)
    _, a, b = rows(benchmarks(timings(found.block_runs.values(), verdicts), 16, {})[0])
    assert (a.ties, a.differing, a.identical) == (2, 0, 0) and a.speedup is not None
    assert (b.ties, b.differing, b.refused) == (0, 2, "other output") and b.speedup is None


def test_a_divergence_that_cannot_be_judged_is_not_a_tie(stub: Callable[..., Contender], measure: Any) -> None:
    found = measure([stub("plain", [5, 6, 7, 8]), stub("a", [5, 6, 9])], PROMPTS)
    verdicts, _ = judged(found, lambda one: "no memory for float64")
    a = rows(benchmarks(timings(found.block_runs.values(), verdicts), 16, {})[0])[1]
    assert a.speedup is None and "no memory for float64" in a.refused


def test_timings_hold_what_was_measured(stub: Callable[..., Contender], measure: Any) -> None:
    looping = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    found = measure([stub("plain", looping, 16), stub("same", looping, 4)], PROMPTS)
    plain, same, *_ = timings(found.block_runs.values(), judged(found, lambda one: TIE)[0])
    assert (same.tokens, same.rounds, same.first_s, same.first_tokens, same.loop_share) == (16, 4, 0.25, 4, 0.5)
    assert (same.drafted, same.kept, same.identical, same.seconds > 0) == (12, [0, 0, 0, 4], 1, True)
    assert (plain.prompt, plain.group, plain.suite, plain.temperature) == ("0", "qa", "mine", 0.0)
