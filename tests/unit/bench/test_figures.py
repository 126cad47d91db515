"""Figures are pooled on the same blocks as the base; differences and failures are not ignored."""

from dataclasses import replace
from typing import Any

import pytest

from foreword.bench.figures import (
    Benchmark,
    Timing,
    benchmarks,
    bootstrap_interval,
    failures,
    noise_reason,
    rows,
    stops_paying,
    tables,
)


def timing(contender: str, group: str, tokens: int, rounds: int, seconds: float, loops: float = 0.0, **more: Any) -> Timing:
    more = {"identical": 1, "prompt": group} | more
    return Timing(group=group, contender=contender, tokens=tokens, rounds=rounds, seconds=seconds, loop_share=loops, **more)


BENCHMARK = Benchmark(
    contenders=("plain", "fast"),
    max_new_tokens=128,
    timings=(
        timing("plain", "rag", 100, 100, 10.0, 0.1, block=0),
        timing("fast", "rag", 100, 25, 4.0, 0.1, block=0, drafted=75, kept=[5, 5, 0, 15]),
        timing("plain", "qa", 20, 20, 2.0, block=1),
        timing("fast", "qa", 20, 20, 2.0, 0.5, block=1, identical=0, ties=1, drafted=25, kept=[20]),
        timing("plain", "translation", 60, 60, 3.0, block=2),
        timing("fast", "translation", 60, 30, 2.0, block=2),
    ),
)


def test_figures_are_pooled_over_tokens_and_seconds() -> None:
    """Not averaged over prompts: the long answer weighs more."""
    plain, fast = rows(BENCHMARK)
    assert (plain.tokens, plain.tokens_per_second, plain.speedup, plain.tokens_per_round) == (180, 12.0, 1.0, 1.0)
    assert plain.loop_share == pytest.approx(10 / 180) and (plain.identical, plain.prompts) == (3, 3)
    assert (fast.tokens_per_second, fast.speedup, fast.tokens_per_round) == (22.5, 22.5 / 12, 180 / 75)
    assert fast.tokens_per_round_by_prompt == pytest.approx((4 + 1 + 2) / 3)
    assert (fast.identical, fast.ties, fast.prompts) == (2, 1, 3)


def test_acceptance_by_depth() -> None:
    """45 drafts: 25 kept nothing, 5 one token, 15 three."""
    fast = rows(BENCHMARK)[1]
    assert fast.accepted_per_position == pytest.approx([20 / 45, 15 / 45, 15 / 45])
    assert fast.conditional_per_position == pytest.approx([20 / 45, 15 / 20, 1.0])
    assert fast.acceptance == 50 / 100 and fast.draft_tokens_per_round == pytest.approx(100 / 75)


def test_a_table_of_some_groups() -> None:
    plain, fast = rows(BENCHMARK, [("", "rag"), ("", "qa")])
    assert (plain.tokens_per_second, fast.tokens_per_second) == (10.0, 20.0)
    assert (fast.speedup, fast.tokens_per_round, fast.prompts) == (2.0, 120 / 45, 2)


def changed(contender: str, block: int, **more: Any) -> Benchmark:
    found = (replace(t, **more) if (t.contender, t.block) == (contender, block) else t for t in BENCHMARK.timings)
    return replace(BENCHMARK, timings=tuple(found))


def test_another_output_has_no_speedup() -> None:
    plain, fast = rows(changed("fast", 1, ties=0, differing=1))
    assert fast.speedup is None and (fast.low, fast.high) == (None, None) and fast.refused == "other output"
    assert fast.tokens_per_second == 22.5 and plain.speedup == 1.0
    table = tables(changed("fast", 1, ties=0, differing=1))
    assert table["rag"][1].speedup == 2.5 and table["qa"][1].speedup is None


@pytest.mark.parametrize(("speedup", "tokens", "is_noise"), [(13.18, 2.0, True), (2.2, 2.0, True), (2.05, 2.0, False)])
def test_a_speedup_above_the_tokens_per_round_is_noise(speedup: float, tokens: float, is_noise: bool) -> None:
    assert noise_reason(speedup, tokens) == ("noise: no more than 2.00 tokens per round" if is_noise else "")


def of_a_busy_machine(name: str = "prompt_lookup", batch: int = 1, seconds: float = 10.0 / 13.18) -> Benchmark:
    plain = timing("plain", "rag", 100, 100, 10.0, batch=batch)
    fast = timing(name, "rag", 100, 50, seconds, batch=batch)
    return Benchmark(("plain", name), 128, (plain, fast), batch)


def test_noise_is_marked_for_our_methods_over_plain() -> None:
    """Also for methods with options or a folder; a round of another decoder, or of a pipeline, may cost less than one of
    plain."""
    for name in ("prompt_lookup", "gsd:width=4", "clover=runs/clover"):
        plain, fast = rows(of_a_busy_machine(name))
        assert (plain.noise, fast.noise) == ("", "noise: no more than 2.00 tokens per round")
        assert fast.speedup == pytest.approx(13.18)
    assert not any(rows(of_a_busy_machine(name))[1].noise for name in ("llama_cpp=model.gguf", "speed:check=ends"))
    assert not rows(of_a_busy_machine(seconds=5.0))[1].noise
    timings = [timing("clover", "rag", 100, 50, 10.0), timing("prompt_lookup", "rag", 100, 100, 2.0)]
    assert not rows(Benchmark(("clover", "prompt_lookup"), 128, tuple(timings)))[1].noise, "rounds of clover cost more"


def test_noise_does_not_decide_whether_a_method_pays() -> None:
    quiet, busy = (rows(of_a_busy_machine(batch=batch, seconds=s))[1] for batch, s in ((1, 5.0), (8, 0.5)))
    assert stops_paying({1: [quiet]}) == {"prompt_lookup": None}
    assert stops_paying({1: [quiet], 8: [busy]}) == {}


def test_an_output_that_could_not_be_judged_has_no_speedup() -> None:
    fast = rows(changed("fast", 1, ties=0, differing=1, unjudged="no memory"))[1]
    assert fast.speedup is None and "no memory" in fast.refused


def test_a_failed_prompt_is_left_out_of_the_comparison() -> None:
    benchmark = changed("fast", 0, failed=1, tokens=0, rounds=0, identical=0, why="RuntimeError: out of paper")
    plain, fast = rows(benchmark)
    assert (fast.failed, fast.prompts, fast.tokens) == (1, 2, 80) and fast.speedup == (80 / 4) / (80 / 5)
    assert (plain.failed, plain.prompts) == (0, 3)
    (failure,) = failures(benchmark.timings)
    assert (failure["contender"], failure["prompt"], failure["why"]) == ("fast", "rag", "RuntimeError: out of paper")


def test_a_contender_that_failed_everywhere_has_no_speed() -> None:
    some = tuple(replace(t, failed=1, tokens=0) if t.contender == "fast" else t for t in BENCHMARK.timings)
    fast = rows(replace(BENCHMARK, timings=some))[1]
    assert (fast.tokens_per_second, fast.speedup, fast.refused, fast.failed) == (0.0, None, "no answers", 3)


def test_without_plain_speeds_are_over_the_first() -> None:
    timings = tuple(one for one in BENCHMARK.timings if one.contender == "fast")
    others = tuple(replace(one, contender="hf", seconds=2 * one.seconds) for one in timings)
    found = rows(Benchmark(("hf", "fast"), 128, others + timings))
    assert [row.speedup for row in found] == [1.0, 2.0]


def test_the_first_token_and_the_rest_separately() -> None:
    """Plain: 100 tokens in 10 s, the first in 1 s. Fast: 25 rounds in 4 s, the first with 4 tokens in 2 s."""
    some = (
        timing("plain", "rag", 100, 100, 10.0, first_s=1.0, first_tokens=1, block=0),
        timing("fast", "rag", 100, 25, 4.0, first_s=2.0, first_tokens=4, block=0),
    )
    plain, fast = rows(Benchmark(("plain", "fast"), 128, some))
    assert (plain.first_token_s, plain.decode_tokens_per_second) == (1.0, 11.0)
    assert (fast.first_token_s, fast.decode_tokens_per_second) == (2.0, 48.0)
    assert fast.decode_speedup == pytest.approx(48 / 11) and fast.speedup == 2.5
    assert rows(BENCHMARK)[1].first_token_s is None


def test_the_median_repeat_counts() -> None:
    seconds = {"plain": [10.0, 12.0, 50.0], "fast": [5.0, 4.0, 4.5]}
    some = [timing(name, "rag", 100, 50, s, repeat=i, block=0) for name, of in seconds.items() for i, s in enumerate(of)]
    (found,) = benchmarks(some, 128, {1: {"plain": 0.5}})
    assert found.repeats == 3 and found.warm_up_s == {"plain": 0.5}
    assert [(t.contender, t.seconds, t.repeat) for t in found.timings] == [("plain", 12.0, 1), ("fast", 4.5, 2)]
    some[0] = replace(some[0], failed=1)
    assert benchmarks(some, 128, {})[0].timings[0].failed == 1  # failing once is failing


def test_an_output_that_differs_in_any_repeat_differs() -> None:
    some = [timing("plain", "rag", 100, 100, 10.0, repeat=repeat) for repeat in range(3)]
    some += [timing("a", "rag", 100, 50, 5.0 + repeat, repeat=repeat) for repeat in range(3)]
    some[5] = replace(some[5], identical=0, differing=1)  # the slowest repeat; its time does not count
    row = rows(benchmarks(some, 128, {})[0])[1]
    assert (row.speedup, row.refused, row.identical, row.differing) == (None, "other output", 0, 1)
    assert row.tokens_per_second == 100 / 6
    some[5] = replace(some[5], ties=1, differing=0)
    row = rows(benchmarks(some, 128, {})[0])[1]
    assert (row.speedup, row.identical, row.ties) == (10 / 6, 0, 1)
    some[5] = replace(some[5], ties=0, differing=1, unjudged="no memory")
    assert "no memory" in rows(benchmarks(some, 128, {})[0])[1].refused


def test_a_block_with_different_failures_is_not_compared() -> None:
    failed = {"plain": ["1"], "a": ["2"], "b": ["1"]}
    some = [timing(name, "rag", 100, 50, 5.0, texts=4, failed=1, failed_at=at, why="-") for name, at in failed.items()]
    assert [row.speedup for row in rows(Benchmark(("plain", "a", "b"), 128, tuple(some)))] == [1.0, None, 1.0]
    assert [(one["contender"], one["prompt"]) for one in failures(some)] == [("plain", "1"), ("a", "2"), ("b", "1")]


def test_benchmarks_by_temperature_and_batch() -> None:
    kinds = [(1, 0.0), (1, 0.8), (4, 0.0), (4, 0.8)]
    some = [timing("plain", "rag", 10, 10, 1.0, batch=batch, temperature=temperature) for batch, temperature in kinds]
    found = benchmarks(some, 128, {})
    assert [(one.temperature, one.batch) for one in found] == [(0.0, 1), (0.0, 4), (0.8, 1), (0.8, 4)]


def test_the_interval_holds_the_ratio_and_shrinks_with_the_prompts() -> None:
    def samples(count: int) -> list[list[float]]:
        return [[100.0, 5.0 + i % 3, 100.0, 10.0 + i % 2] for i in range(count)]

    few, many = (bootstrap_interval(samples(count)) for count in (12, 120))
    ratio = 10.5 / 6
    assert few[0] is not None and few[1] is not None and many[0] is not None and many[1] is not None
    assert few[0] < many[0] < ratio < many[1] < few[1]
    assert bootstrap_interval(samples(12)) == few and bootstrap_interval(samples(5)) == (None, None)
    assert bootstrap_interval([[100.0, 5.0, 100.0, 10.0]] * 6) == (2.0, 2.0)


def test_turns_of_a_prompt_are_one_sample() -> None:
    turns = [
        timing(name, "chat", 100, 50, s + turn, prompt="81", turn=turn, block=0)
        for name, s in (("plain", 10.0), ("a", 5.0))
        for turn in (0, 1)
    ]
    assert rows(Benchmark(("plain", "a"), 128, tuple(turns)))[1].low is None


def test_tables_overall_of_copying_groups_and_by_group() -> None:
    found = tables(BENCHMARK)
    assert list(found) == ["overall", "rag + translation", "rag", "qa", "translation"]
    assert found["rag + translation"] == rows(BENCHMARK, [("", "rag"), ("", "translation")])
    assert found["qa"] == rows(BENCHMARK, [("", "qa")])


def test_one_group_is_overall_and_several_sets_are_named() -> None:
    assert list(tables(Benchmark(("plain",), 8, (timing("plain", "rag", 8, 8, 1.0),)))) == ["overall"]
    two = tuple(timing("plain", "qa", 8, 8, 1.0, suite=name, block=i) for i, name in enumerate("ab"))
    assert list(tables(Benchmark(("plain",), 8, two))) == ["overall", "a", "b", "a: qa", "b: qa"]


def batch(size: int, **seconds: float) -> Benchmark:
    timings = (timing(name, "mixed", 120, 60, spent, texts=2, identical=2, batch=size) for name, spent in seconds.items())
    return Benchmark(tuple(seconds), 64, tuple(timings), size)


def test_a_method_stops_paying_where_it_never_wins_again() -> None:
    found = {
        1: rows(batch(1, plain=10.0, fast=5.0, late=8.0)),
        4: rows(batch(4, plain=6.0, fast=4.0, late=6.0)),
        8: rows(batch(8, plain=4.0, fast=5.0, late=3.2)),
    }
    stops = stops_paying(found)
    assert (stops["fast"], stops["late"]) == (8, None)
    assert stops_paying({2: rows(batch(2, plain=1.0, fast=2.0))})["fast"] == 2
