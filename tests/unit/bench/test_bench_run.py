"""The measuring loop: everybody gets every prompt, nobody is favoured, and looping is counted as it is."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from foreword.bench.contenders import Contender
from foreword.bench.run import MIXED, run, sweep
from foreword.errors import InputError
from foreword.text import Prompt

Diary = list[tuple[str, str, int]]


def test_everybody_answers_every_prompt_once(stub: Callable[..., Contender], diary: Diary, questions: list[Prompt]) -> None:
    found = run([stub("plain"), stub("a"), stub("b")], questions, max_new_tokens=16)
    warm_up, timed = diary[:3], diary[3:]
    assert warm_up == [(name, "question 0", 8) for name in ("plain", "a", "b")]
    assert Counter(timed) == Counter((name, p.turns[0], 16) for name in ("plain", "a", "b") for p in questions)
    assert len(found.timings) == len(timed) and found.contenders == ("plain", "a", "b")


def test_contenders_take_turns_in_beginning(stub: Callable[..., Contender], diary: Diary, questions: list[Prompt]) -> None:
    run([stub("plain"), stub("a"), stub("b")], questions[:6])
    rounds = [tuple(name for name, _, _ in diary[i : i + 3]) for i in range(3, len(diary), 3)]
    assert Counter(order[0] for order in rounds) == {"plain": 2, "a": 2, "b": 2}
    assert {len(set(order)) for order in rounds} == {3}
    for name in ("plain", "a", "b"):
        assert Counter(order.index(name) for order in rounds) == {0: 2, 1: 2, 2: 2}


def test_a_short_run_warms_up_no_longer(stub: Callable[..., Contender], diary: Diary, questions: list[Prompt]) -> None:
    run([stub("plain")], questions[:1], max_new_tokens=3)
    assert [count for _, _, count in diary] == [3, 3]


def test_what_is_written_down(stub: Callable[..., Contender], questions: list[Prompt]) -> None:
    looping = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    found = run([stub("plain", looping, 16), stub("same", looping, 4), stub("other", looping[:-1], 5)], questions)
    assert found.groups == ["rag", "qa", "mt_bench", "math"]  # the two-turn question is MT-bench's
    assert [t.prompt for t in found.of("plain")] == ["0", "2", "5", "1", "4", "3", "6"]
    assert [t.prompt for t in found.of("same", ["qa", "math"])] == ["1", "4", "6"]
    for timing in found.of("same"):
        assert (timing.tokens, timing.rounds, timing.prefill_s) == (16, 4, 0.25)
        assert timing.identical == 1 and timing.loop_share == 0.5 and timing.seconds > 0
    assert all(t.identical for t in found.of("plain")) and not any(t.identical for t in found.of("other"))


def test_progress_is_told(stub: Callable[..., Contender], questions: list[Prompt]) -> None:
    told: list[tuple[int, int]] = []
    run([stub("plain")], questions[:3], progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_whom_speeds_are_compared_with(stub: Callable[..., Contender], questions: list[Prompt]) -> None:
    assert run([stub("hf"), stub("plain")], questions[:1]).base == "plain"
    assert run([stub("hf"), stub("a")], questions[:1]).base == "hf"


def test_nothing_to_measure(stub: Callable[..., Contender], questions: list[Prompt]) -> None:
    for contenders, prompts in (([], questions), ([stub("plain")], []), ([stub("a"), stub("a")], questions)):
        with pytest.raises(InputError, match="at least one of each, and no contender twice"):
            run(contenders, prompts)


# Several texts at once ----------------------------------------------------------------------------------------------------


def many(count: int, kinds: int = 3) -> list[Prompt]:
    return [Prompt(str(i), f"kind {i * kinds // count}", [f"question {i}"]) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(24, 4, [8, 8, 8]), (26, 4, [8, 9, 9]), (24, 16, [24]), (24, 24, [24])]
)
def test_blocks_are_two_batches_and_hold_every_prompt(
    stub: Callable[..., Contender], diary: Diary, count: int, batch: int, sizes: list[int]
) -> None:
    found = run([stub("plain"), stub("a")], many(count), batch=batch)
    assert [t.texts for t in found.of("a")] == sizes and {t.batch for t in found.timings} == {batch}
    assert Counter(word for one in found.of("a") for word in one.prompt.split()) == Counter(map(str, range(count)))
    for one in found.of("a"):
        assert (one.tokens, one.rounds, one.identical) == (3 * one.texts, 3 * one.texts, one.texts)
        assert one.prefill_s is None
    assert [name for name, _, _ in diary[2:]] == [
        name
        for place, size in enumerate(sizes)
        for name in (("plain", "a") if place % 2 == 0 else ("a", "plain"))
        for _ in range(size)
    ]


def test_a_block_of_one_kind_keeps_its_name(stub: Callable[..., Contender]) -> None:
    assert [t.group for t in run([stub("plain")], many(12), batch=2).timings] == ["kind 0", "kind 1", "kind 2"]
    assert [t.group for t in run([stub("plain")], many(12), batch=3).timings] == [MIXED, MIXED]


def test_too_few_prompts_are_refused_before_anything_runs(stub: Callable[..., Contender], diary: Diary) -> None:
    with pytest.raises(InputError, match="9 prompts cannot fill a batch of 16; give at least 16"):
        sweep(lambda _: [stub("plain")], [1, 16], many(9))
    assert not diary


def test_a_sweep_closes_what_it_made_and_tells_its_progress(stub: Callable[..., Contender]) -> None:
    closed, told, captured = [], [], []

    def make(batch: int) -> list[Contender]:
        one = stub("plain")
        return [
            Contender(
                one.name, one.write, lambda asked, most: captured.append((len(asked), most)), lambda: closed.append(batch)
            )
        ]

    found = sweep(make, [1, 4], many(8), 16, lambda *what: told.append(what))
    assert [(one.batch, len(one.timings)) for one in found] == [(1, 8), (4, 1)] and closed == [1, 4]
    assert captured == [(8, 16)] * 2 and told[-1] == (4, 8, 8) and told[0] == (1, 1, 8)
    assert all(one.warm_up_s["plain"] > 0 for one in found)


def test_a_sweep_closes_after_a_failure_too() -> None:
    closed: list[int] = []

    def broken(*_: object) -> list[Any]:
        raise RuntimeError("out of paper")

    with pytest.raises(RuntimeError, match="out of paper"):
        sweep(lambda batch: [Contender("plain", broken, close=lambda: closed.append(batch))], [2], many(4))
    assert closed == [2]
