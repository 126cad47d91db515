"""The measuring loop: all contenders get every prompt and turn, none is favoured, and failures are reported."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foreword.bench import Contender, Plan, Suite, run
from foreword.bench.run import MIXED, BlockPlace, BlockRun, blocks, left_out, places
from foreword.errors import InputError
from foreword.text import Prompt, Tokenizer

Diary = list[tuple[str, str, int]]
Make = Callable[..., Contender]
Measure = Callable[..., Any]


def test_all_contenders_answer_every_prompt_and_turn_once(
    stub: Make, diary: Diary, questions: list[Prompt], measure: Measure
) -> None:
    names = ("plain", "a", "b")
    found = measure([stub(name) for name in names], questions)
    warm_up, timed = diary[:3], diary[3:]
    assert warm_up == [(name, "0", 8) for name in names]
    asked = [*questions, questions[3]]  # the one with two turns
    assert Counter(timed) == Counter((name, p.id, 16) for name in names for p in asked)
    assert len(found.block_runs) == 8 and {tuple(block_run.answers) for block_run in found.block_runs.values()} == {names}
    assert {block_run.place.turn for block_run in found.block_runs.values()} == {0, 1}


def test_contenders_take_turns_at_being_first(stub: Make, diary: Diary, questions: list[Prompt], measure: Measure) -> None:
    measure([stub("plain"), stub("a"), stub("b")], questions[:3] + questions[4:], repeats=2)
    orders = [tuple(name for name, _, _ in diary[i : i + 3]) for i in range(3, len(diary), 3)]
    assert len(orders) == 12 and {len(set(order)) for order in orders} == {3}
    for name in ("plain", "a", "b"):
        assert Counter(order.index(name) for order in orders) == {0: 4, 1: 4, 2: 4}


def test_getting_ready_is_not_timed(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    waits = []

    def ready() -> None:
        waits.append(0.05)
        time.sleep(0.05)

    found = measure([stub("plain"), replace(stub("a"), ready=ready)], questions[:3])
    assert len(waits) == 3 and all(block_run.seconds["a"] < 0.05 for block_run in found.block_runs.values())

    def broken() -> None:
        raise RuntimeError("no room")

    found = measure([stub("plain"), replace(stub("a"), ready=broken)], questions[:1])
    assert [block_run.answers["a"][0].failed for block_run in found.block_runs.values()] == ["RuntimeError: no room"]


def test_the_warm_up_is_no_longer_than_the_run(stub: Make, diary: Diary, questions: list[Prompt], measure: Measure) -> None:
    measure([stub("plain")], questions[:1], max_new_tokens=3)
    assert [count for _, _, count in diary] == [3, 3]


def test_the_next_turn_follows_the_reply_of_the_base(
    stub: Make, questions: list[Prompt], measure: Measure, tokenizer: Tokenizer
) -> None:
    reply = tokenizer.hf.encode("hello", add_special_tokens=False)
    plain, other = stub("plain", reply), stub("other", [*reply, *reply])
    measure([other, plain], [questions[3]])
    expected = tokenizer.encode(questions[3].after(["hello"]))
    assert [list(task.ids) for task in other.write.seen[-1:]] == [expected] == [list(plain.write.seen[-1].ids)]


def test_failures_are_reported_and_the_rest_goes_on(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    found = measure([stub("plain"), stub("a", fails_at=("2", "3"))], questions)
    failed = [
        (block_run.tasks[0].prompt, block_run.place.turn, block_run.answers["a"][0].failed)
        for block_run in found.block_runs.values()
    ]
    assert [one for one in failed if one[2]] == [
        ("2", 0, "RuntimeError: out of paper"),
        ("3", 0, "RuntimeError: out of paper"),
        ("3", 1, "RuntimeError: out of paper"),
    ]
    assert not any(block_run.answers["plain"][0].failed for block_run in found.block_runs.values())


def test_without_a_reply_of_the_base_there_is_no_next_turn(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    found = measure([stub("plain", fails_at=("3",)), stub("a")], questions)
    last = found.block_runs[BlockPlace(1, 0.0, 0, 1, 0)]
    for answers in last.answers.values():
        assert answers[0].failed and "the turn before failed" in answers[0].failed


def test_a_prompt_that_cannot_be_encoded_fails_for_all_contenders(
    stub: Make, measure: Measure, hf_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tokenizer, "chat_template", None)
    found = measure([stub("plain"), stub("a")], [Prompt("0", "qa", ["one"]), Prompt("1", "writing", ["one", "two"])])
    last = found.block_runs[BlockPlace(1, 0.0, 0, 1, 0)]
    assert all("no chat template" in (answers[0].failed or "") for answers in last.answers.values())


def test_contenders_that_learn_forget_before_each_repeat(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    forgot: list[str] = []
    measure([stub("plain"), stub("a", forget=lambda: forgot.append("a"))], questions, repeats=3, temperatures=(0.0, 1.0))
    assert len(forgot) == 6


def test_other_decoders_run_greedily_at_batch_1(stub: Make, measure: Measure) -> None:
    found = measure([stub("plain"), stub("hf", greedy_single=True)], many(8), batches=(1, 4), temperatures=(0.0, 0.7))
    with_others = {block_run.place[:2] for block_run in found.block_runs.values() if "hf" in block_run.answers}
    assert with_others == {(1, 0.0)} and {block_run.place[:2] for block_run in found.block_runs.values()} == {
        (batch, temperature) for batch in (1, 4) for temperature in (0.0, 0.7)
    }


def test_a_run_resumes_where_it_stopped(stub: Make, diary: Diary, questions: list[Prompt], measure: Measure) -> None:
    reported: list[BlockRun] = []
    whole = measure([stub("plain")], questions, repeats=2, on_block_run=reported.append)
    assert list(whole.block_runs.values()) == reported
    diary.clear()
    some = {block_run.place: block_run for block_run in reported[:11]}
    again = measure([stub("plain")], questions, repeats=2, known=some)
    assert len(diary) == 1 + 5 and set(again.block_runs) == set(whole.block_runs)
    diary.clear()
    measure([stub("plain")], questions, repeats=2, known=whole.block_runs)
    assert not diary


def test_progress_is_reported(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    events: list[tuple[str, int, int]] = []
    measure([stub("plain")], questions[:3], repeats=2, progress=lambda *event: events.append(event))
    assert events[:2] == [("warming up plain", 0, 6), ("batch 1, run 1 of 2", 1, 6)]
    assert events[-1] == ("batch 1, run 2 of 2", 6, 6)


def test_nothing_to_measure(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    for contenders in ([], [stub("a"), stub("a")]):
        with pytest.raises(InputError, match="at least one, and none twice"):
            measure(contenders, questions)
    with pytest.raises(InputError, match="no prompts|cannot fill"):
        measure([stub("plain")], [])


def test_a_warm_up_that_fails_is_reported(stub: Make, questions: list[Prompt], measure: Measure) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no graph today")

    found = measure([stub("plain"), stub("a", capture=broken)], questions[:1])
    assert found.warm_up_failed == {"a": "RuntimeError: no graph today"} and found.warm_up_s[1]["plain"] > 0


# Batches -----------------------------------------------------------------------------------------------------------------


def many(count: int, kinds: int = 3, turns: int = 1) -> list[Prompt]:
    return [Prompt(str(i), f"kind {i * kinds // count}", [f"question {i}"] * turns) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "batch", "sizes"), [(24, 4, [8, 8, 8]), (26, 4, [8, 9, 9]), (24, 16, [24]), (24, 24, [24])]
)
def test_blocks_are_two_batches_and_hold_every_prompt(
    stub: Make, diary: Diary, measure: Measure, count: int, batch: int, sizes: list[int]
) -> None:
    found = measure([stub("plain"), stub("a")], many(count), batches=(batch,))
    block_runs = list(found.block_runs.values())
    assert [len(block_run.tasks) for block_run in block_runs] == sizes and {
        block_run.place.batch for block_run in block_runs
    } == {batch}
    assert [task.prompt for block_run in block_runs for task in block_run.tasks] == list(map(str, range(count)))
    warm_up, timed = diary[: 2 * batch], diary[2 * batch :]
    assert warm_up == [(name, str(i), 8) for name in ("plain", "a") for i in range(batch)]  # at the batch size that is timed
    assert [name for name, _, _ in timed] == [
        name
        for place, size in enumerate(sizes)
        for name in (("plain", "a") if place % 2 == 0 else ("a", "plain"))
        for _ in range(size)
    ]


def test_a_block_of_one_kind_keeps_its_name(stub: Make, measure: Measure) -> None:
    groups = [
        [h.group for h in measure([stub("plain")], many(12), batches=(batch,)).block_runs.values()] for batch in (2, 3)
    ]
    assert groups == [["kind 0", "kind 1", "kind 2"], [MIXED, MIXED]]


def test_too_few_prompts_are_refused_before_anything_runs(stub: Make, diary: Diary, measure: Measure) -> None:
    with pytest.raises(InputError, match="9 prompts cannot fill a batch of 16; give at least 16"):
        measure([stub("plain")], many(9), batches=(1, 16))
    assert not diary


def test_later_turns_that_cannot_fill_a_batch_are_left_out_and_counted() -> None:
    prompts = many(12) + [Prompt("x", "writing", ["one", "two"]), Prompt("y", "writing", ["one", "two"])]
    plan = Plan([Suite("mine", prompts)], batches=(1, 2, 4))
    assert [len(blocks(plan, batch, 1)) for batch in (1, 2, 4)] == [2, 1, 0] and left_out(plan) == {4: 2}
    assert len(places(plan, 1)) == 14 + 2 and len(places(plan, 4)) == 1


def test_a_set_of_prompts_is_identified_by_its_content() -> None:
    def identity(*messages: str, name: str = "mine") -> str:
        chat = [{"role": role, "content": text} for role, text in zip(("system", "user"), messages, strict=True)]
        return Plan([Suite(name, [Prompt("0", "qa", [messages[-1]], chat)])]).prompts_sha256

    assert identity("be brief", "hello") == identity("be brief", "hello")
    three = identity("be brief", "hello"), identity("be long", "hello"), identity("be brief", "hello", name="other")
    assert len(set(three)) == 3


def test_a_run_closes_its_contenders_also_after_a_failure(questions: list[Prompt], tokenizer: Tokenizer, stub: Make) -> None:
    closed: list[str] = []

    def interrupted(*_: object) -> list[Any]:
        raise KeyboardInterrupt

    contender = Contender("plain", interrupted, close=lambda: closed.append("plain"))
    with pytest.raises(KeyboardInterrupt):
        run(lambda _: [contender], Plan([Suite("mine", questions)]), tokenizer)
    assert closed == ["plain"]
