"""The measuring loop: everybody gets every prompt, nobody is favoured, and looping is counted as it is."""

from collections import Counter
from collections.abc import Callable

import pytest

from foreword.bench.contenders import Contender
from foreword.bench.run import run
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
        assert timing.same_as_first and timing.loop_share == 0.5 and timing.seconds > 0
    assert all(t.same_as_first for t in found.of("plain")) and not any(t.same_as_first for t in found.of("other"))


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
