"""The measuring loop: everybody gets every prompt and every turn, nobody is favoured, and what fails is told."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foreword.bench import Contender, Plan, Suite, run
from foreword.bench.run import MIXED, Heat, HeatPlace, blocks, left_out, places
from foreword.errors import InputError
from foreword.text import Prompt, Tokenizer

Diary = list[tuple[str, str, int]]
Make = Callable[..., Contender]
Race = Callable[..., Any]


def test_everybody_answers_every_prompt_and_turn_once(stub: Make, diary: Diary, questions: list[Prompt], race: Race) -> None:
    names = ("plain", "a", "b")
    found = race([stub(name) for name in names], questions)
    warm_up, timed = diary[:3], diary[3:]
    assert warm_up == [(name, "0", 8) for name in names]
    asked = [*questions, questions[3]]  # the one with two turns
    assert Counter(timed) == Counter((name, p.id, 16) for name in names for p in asked)
    assert len(found.heats) == 8 and {tuple(heat.answers) for heat in found.heats.values()} == {names}
    assert {heat.place.turn for heat in found.heats.values()} == {0, 1}


def test_contenders_take_turns_in_beginning(stub: Make, diary: Diary, questions: list[Prompt], race: Race) -> None:
    race([stub("plain"), stub("a"), stub("b")], questions[:3] + questions[4:], repeats=2)
    orders = [tuple(name for name, _, _ in diary[i : i + 3]) for i in range(3, len(diary), 3)]
    assert len(orders) == 12 and {len(set(order)) for order in orders} == {3}
    for name in ("plain", "a", "b"):
        assert Counter(order.index(name) for order in orders) == {0: 4, 1: 4, 2: 4}


def test_getting_ready_is_in_nobody_s_time(stub: Make, questions: list[Prompt], race: Race) -> None:
    waits = []

    def ready() -> None:
        waits.append(0.05)
        time.sleep(0.05)

    found = race([stub("plain"), replace(stub("a"), ready=ready)], questions[:3])
    assert len(waits) == 3 and all(heat.seconds["a"] < 0.05 for heat in found.heats.values())

    def broken() -> None:
        raise RuntimeError("no room")

    found = race([stub("plain"), replace(stub("a"), ready=broken)], questions[:1])
    assert [heat.answers["a"][0].failed for heat in found.heats.values()] == ["RuntimeError: no room"]


def test_a_short_run_warms_up_no_longer(stub: Make, diary: Diary, questions: list[Prompt], race: Race) -> None:
    race([stub("plain")], questions[:1], max_new_tokens=3)
    assert [count for _, _, count in diary] == [3, 3]


def test_the_next_turn_follows_the_reply_of_the_base(
    stub: Make, questions: list[Prompt], race: Race, words: Tokenizer
) -> None:
    said = words.hf.encode("hello", add_special_tokens=False)
    plain, other = stub("plain", said), stub("other", [*said, *said])
    race([other, plain], [questions[3]])
    expected = words.encode(questions[3].after(["hello"]))
    assert [list(task.ids) for task in other.write.seen[-1:]] == [expected] == [list(plain.write.seen[-1].ids)]


def test_what_fails_is_told_and_the_rest_goes_on(stub: Make, questions: list[Prompt], race: Race) -> None:
    found = race([stub("plain"), stub("a", fails_at=("2", "3"))], questions)
    failed = [(heat.tasks[0].prompt, heat.place.turn, heat.answers["a"][0].failed) for heat in found.heats.values()]
    assert [one for one in failed if one[2]] == [
        ("2", 0, "RuntimeError: out of paper"),
        ("3", 0, "RuntimeError: out of paper"),
        ("3", 1, "RuntimeError: out of paper"),
    ]
    assert not any(heat.answers["plain"][0].failed for heat in found.heats.values())


def test_without_a_reply_of_the_base_there_is_no_next_turn(stub: Make, questions: list[Prompt], race: Race) -> None:
    found = race([stub("plain", fails_at=("3",)), stub("a")], questions)
    last = found.heats[HeatPlace(1, 0.0, 0, 1, 0)]
    for answers in last.answers.values():
        assert answers[0].failed and "the turn before failed" in answers[0].failed


def test_a_prompt_that_cannot_be_asked_fails_for_everybody(
    stub: Make, race: Race, hf_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tokenizer, "chat_template", None)
    found = race([stub("plain"), stub("a")], [Prompt("0", "qa", ["one"]), Prompt("1", "writing", ["one", "two"])])
    last = found.heats[HeatPlace(1, 0.0, 0, 1, 0)]
    assert all("no chat template" in (answers[0].failed or "") for answers in last.answers.values())


def test_who_learns_forgets_before_each_repeat(stub: Make, questions: list[Prompt], race: Race) -> None:
    forgot: list[str] = []
    race([stub("plain"), stub("a", forget=lambda: forgot.append("a"))], questions, repeats=3, temperatures=(0.0, 1.0))
    assert len(forgot) == 6


def test_others_write_greedily_and_alone(stub: Make, race: Race) -> None:
    found = race([stub("plain"), stub("hf", alone=True)], many(8), batches=(1, 4), temperatures=(0.0, 0.7))
    with_others = {heat.place[:2] for heat in found.heats.values() if "hf" in heat.answers}
    assert with_others == {(1, 0.0)} and {heat.place[:2] for heat in found.heats.values()} == {
        (batch, heat) for batch in (1, 4) for heat in (0.0, 0.7)
    }


def test_a_run_goes_on_where_it_was_cut(stub: Make, diary: Diary, questions: list[Prompt], race: Race) -> None:
    heard: list[Heat] = []
    whole = race([stub("plain")], questions, repeats=2, heard=heard.append)
    assert list(whole.heats.values()) == heard
    diary.clear()
    some = {heat.place: heat for heat in heard[:11]}
    again = race([stub("plain")], questions, repeats=2, known=some)
    assert len(diary) == 1 + 5 and set(again.heats) == set(whole.heats)
    diary.clear()
    race([stub("plain")], questions, repeats=2, known=whole.heats)
    assert not diary


def test_progress_is_told(stub: Make, questions: list[Prompt], race: Race) -> None:
    told: list[tuple[str, int, int]] = []
    race([stub("plain")], questions[:3], repeats=2, progress=lambda *what: told.append(what))
    assert told[:2] == [("warming up plain", 0, 6), ("batch 1, run 1 of 2", 1, 6)]
    assert told[-1] == ("batch 1, run 2 of 2", 6, 6)


def test_nothing_to_measure(stub: Make, questions: list[Prompt], race: Race) -> None:
    for contenders in ([], [stub("a"), stub("a")]):
        with pytest.raises(InputError, match="at least one, and nobody twice"):
            race(contenders, questions)
    with pytest.raises(InputError, match="no prompts|cannot fill"):
        race([stub("plain")], [])


def test_a_warm_up_that_fails_is_told(stub: Make, questions: list[Prompt], race: Race) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no graph today")

    found = race([stub("plain"), stub("a", capture=broken)], questions[:1])
    assert found.warm_up_failed == {"a": "RuntimeError: no graph today"} and found.warm_up_s[1]["plain"] > 0


# Several texts at once ----------------------------------------------------------------------------------------------------


def many(count: int, kinds: int = 3, turns: int = 1) -> list[Prompt]:
    return [Prompt(str(i), f"kind {i * kinds // count}", [f"question {i}"] * turns) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(24, 4, [8, 8, 8]), (26, 4, [8, 9, 9]), (24, 16, [24]), (24, 24, [24])]
)
def test_blocks_are_two_batches_and_hold_every_prompt(
    stub: Make, diary: Diary, race: Race, count: int, batch: int, sizes: list[int]
) -> None:
    found = race([stub("plain"), stub("a")], many(count), batches=(batch,))
    heats = list(found.heats.values())
    assert [len(heat.tasks) for heat in heats] == sizes and {heat.place.batch for heat in heats} == {batch}
    assert [task.prompt for heat in heats for task in heat.tasks] == list(map(str, range(count)))
    warm_up, timed = diary[: 2 * batch], diary[2 * batch :]
    assert warm_up == [(name, str(i), 8) for name in ("plain", "a") for i in range(batch)]  # in the company that is timed
    assert [name for name, _, _ in timed] == [
        name
        for place, size in enumerate(sizes)
        for name in (("plain", "a") if place % 2 == 0 else ("a", "plain"))
        for _ in range(size)
    ]


def test_a_block_of_one_kind_keeps_its_name(stub: Make, race: Race) -> None:
    groups = [[h.group for h in race([stub("plain")], many(12), batches=(batch,)).heats.values()] for batch in (2, 3)]
    assert groups == [["kind 0", "kind 1", "kind 2"], [MIXED, MIXED]]


def test_too_few_prompts_are_refused_before_anything_runs(stub: Make, diary: Diary, race: Race) -> None:
    with pytest.raises(InputError, match="9 prompts cannot fill a batch of 16; give at least 16"):
        race([stub("plain")], many(9), batches=(1, 16))
    assert not diary


def test_later_turns_that_cannot_fill_a_batch_are_left_out_and_told() -> None:
    prompts = many(12) + [Prompt("x", "writing", ["one", "two"]), Prompt("y", "writing", ["one", "two"])]
    plan = Plan([Suite("mine", prompts)], batches=(1, 2, 4))
    assert [len(blocks(plan, batch, 1)) for batch in (1, 2, 4)] == [2, 1, 0] and left_out(plan) == {4: 2}
    assert len(places(plan, 1)) == 14 + 2 and len(places(plan, 4)) == 1


def test_a_set_of_prompts_is_known_by_all_that_is_asked() -> None:
    def known(*messages: str, name: str = "mine") -> str:
        said = [{"role": role, "content": text} for role, text in zip(("system", "user"), messages, strict=True)]
        return Plan([Suite(name, [Prompt("0", "qa", [messages[-1]], said)])]).prompts_sha256

    assert known("be brief", "hello") == known("be brief", "hello")
    assert len({known("be brief", "hello"), known("be long", "hello"), known("be brief", "hello", name="other")}) == 3


def test_a_run_closes_what_it_made_after_a_failure_too(questions: list[Prompt], words: Tokenizer, stub: Make) -> None:
    closed: list[str] = []

    def interrupted(*_: object) -> list[Any]:
        raise KeyboardInterrupt

    contender = Contender("plain", interrupted, close=lambda: closed.append("plain"))
    with pytest.raises(KeyboardInterrupt):
        run(lambda _: [contender], Plan([Suite("mine", questions)]), words)
    assert closed == ["plain"]
