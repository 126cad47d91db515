"""Who is timed: all of them write the same text, count their rounds, and forget what they must not know."""

import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foreword
from doubles import READY, taught
from foreword.api import LLM
from foreword.bench import Contender, Manner, Plan, Suite, Task, contender, context_for, run
from foreword.bench.contenders import apart
from foreword.bench.passes import DRIFT_ROWS, drift_check
from foreword.bench.widening import load_widened
from foreword.core.sampling import Sampling
from foreword.drafters import saved
from foreword.engine.engine import Engine
from foreword.engine.request import Request
from foreword.errors import InputError, UnknownMethod
from foreword.methods import METHODS, make
from foreword.model.cache import SharedCacheMemory
from foreword.model.model import Model
from foreword.text import Prompt

WORDS = "the words that come before the words that come before"


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1) as loaded:
        yield loaded


def task(llm: LLM, words: str = WORDS, index: int = 0) -> Task:
    return Task(str(index), tuple(llm.tokenizer.encode(words)), index)


def answer(one: Contender, llm: LLM, tokens: int, **more: Any) -> Any:
    return one.write([task(llm)], Manner(tokens, **more))[0]


@pytest.mark.parametrize(
    ("device", "gpus", "expected"), [("cuda", 1, ["amusd"]), ("cuda", 2, []), ("cpu", 1, []), ("cpu", 0, [])]
)
def test_who_drafts_on_the_one_gpu_beside_the_target_is_timed_apart(device: str, gpus: int, expected: list[str]) -> None:
    assert apart(list(METHODS), torch.device(device), gpus) == expected


def test_the_pulse_is_taken_where_passes_are_replayed_alone(llm: LLM) -> None:
    found = drift_check(llm.model)
    assert list(found) == (list(DRIFT_ROWS) if llm.model.device.type == "cuda" else []) and all(
        ms > 0 for ms in found.values()
    )
    assert len(llm.generate(WORDS, max_new_tokens=4).tokens) == 4  # and the model is as it was


def test_methods_have_caches_of_their_own(llm: LLM) -> None:
    """In turns on shared weights, as the loop runs them."""
    whole = llm.generate(WORDS, max_new_tokens=16)
    contenders = [contender(llm, name, max_context=128) for name in READY]
    for _ in range(2):
        for one in contenders:
            found = answer(one, llm, 16)
            assert found.tokens == whole.tokens and 0 < found.first_s < 60
            assert sum(found.accepted) == 16 and len(found.drafted) == len(found.accepted)
    assert llm.generate(WORDS, max_new_tokens=16).tokens == whole.tokens and llm.method == "plain"


def test_methods_may_have_caches_in_the_same_memory(llm: LLM, tmp_path: Path) -> None:
    """Whatever one leaves there is nothing to the next; one has layers with a cache of their own, too."""
    saved.save(taught("clover2", llm.model, heads=3), tmp_path, llm.model)
    whole, cache_memory = llm.generate(WORDS, max_new_tokens=16), SharedCacheMemory()
    names = [*READY, f"clover2={tmp_path}"]
    contenders = [contender(llm, name, max_context=128, slots=2, cache_memory=cache_memory) for name in names]
    memory = cache_memory._numbers
    for _ in range(2):
        for one in contenders:
            assert answer(one, llm, 16).tokens == whole.tokens
            assert memory is cache_memory._numbers and memory is not None and memory.any()  # nobody has any other
            memory.fill_(math.nan)


def test_a_berth_ends_with_those_who_share_it(llm: LLM) -> None:
    """A benchmark asks for the next number of texts when the memory of the last one is free."""
    held: list[Callable[[], SharedCacheMemory | None]] = []

    def make_for(count: int) -> list[Contender]:
        assert not any(one() for one in held)
        cache_memory = SharedCacheMemory()
        held.append(weakref.ref(cache_memory))
        return [contender(llm, name, 128, count, cache_memory=cache_memory) for name in ("plain", "prompt_lookup")]

    plan = Plan([Suite("mine", [Prompt(str(i), "qa", [WORDS]) for i in range(4)])], 4, (1, 4, 2))
    run(make_for, plan, llm.tokenizer)
    assert len(held) == 3


def test_a_text_is_not_found_in_memory_that_another_had(llm: LLM) -> None:
    cache_memory = SharedCacheMemory()
    models = [Model(llm.model.hf, cache_memory=cache_memory) for _ in range(2)]
    first, other = (Engine(model, make("plain"), 1, 64) for model in models)
    request = Request(task(llm).ids, Sampling(), 8, reuse=True)
    first.take_berth()
    assert [first.generate([request])[0].reused > 0 for _ in range(2)] == [False, True]
    other.take_berth()
    other.generate([request])
    first.take_berth()
    (again,) = first.generate([request])
    assert not again.reused and again.tokens == llm.generate(WORDS, max_new_tokens=8).tokens
    first.add(request)
    with pytest.raises(AssertionError, match="under way"):
        first.take_berth()
    for model in models:
        model.release()


def test_texts_that_are_drawn_are_those_of_plain(llm: LLM) -> None:
    manner, asked = Manner(24, temperature=0.9, seed=3), [task(llm, WORDS, i) for i in range(3)]
    plain = [one.tokens for one in contender(llm, "plain", slots=2).write(asked, manner)]
    assert len({tuple(tokens) for tokens in plain}) == 3  # the same prompt, another draw
    for name in READY:
        assert [one.tokens for one in contender(llm, name).write(asked, manner)] == plain


def test_a_method_takes_its_options(llm: LLM) -> None:
    assert contender(llm, "plain").name == "plain"
    wide = answer(contender(llm, "prompt_lookup", rows=6), llm, 60)
    assert len(wide.accepted) < len(wide.tokens)
    with pytest.raises(InputError, match="min_match"):
        contender(llm, "prompt_lookup", min_match=9)
    with pytest.raises(UnknownMethod, match="did you mean 'plain'"):
        contender(llm, "plan")


def test_who_learns_can_forget(llm: LLM) -> None:
    """The second time it knows the text; having forgotten, it needs as many rounds as at first."""
    learner = contender(llm, "token_recycling", rows=16)
    first, again = answer(learner, llm, 60), answer(learner, llm, 60)
    assert len(again.accepted) < len(first.accepted)
    learner.forget()
    assert answer(learner, llm, 60).accepted == first.accepted


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM) -> None:
    one = contender(llm, "plain", max_context=64, slots=2)
    asked = [task(llm, "hello"), task(llm, "long " * 40, 1), task(llm, "words", 2)]
    answers = one.write(asked, Manner(8))
    assert [bool(found.failed) for found in answers] == [False, True, False]
    assert "PromptError: the prompt has" in answers[1].failed and len(answers[2].tokens) == 8


def test_a_target_that_answers_nan_has_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one = contender(llm, "plain", max_context=128)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model.hf.model.norm.weight, "data", torch.full_like(llm.model.hf.model.norm.weight, torch.nan))
        found = answer(one, llm, 8)
    assert found.failed and "NaN" in found.failed
    assert not answer(one, llm, 8).failed


def test_texts_side_by_side_are_those_of_one_at_a_time(llm: LLM) -> None:
    asked = [task(llm, f"the words that come before {i}", i) for i in range(5)]
    alone = contender(llm, "plain")
    texts = [alone.write([one], Manner(12))[0].tokens for one in asked]
    for name in READY:
        together = contender(llm, name, max_context=128, slots=2)
        assert [found.tokens for found in together.write(asked, Manner(12))] == texts
        together.close()


def test_a_context_holds_the_longest_answer_and_no_more(llm: LLM) -> None:
    prompts = [Prompt(str(i), "qa", [text]) for i, text in enumerate(("hello", "a much longer question than hello"))]
    longest = max(len(llm.tokenizer.encode(prompt.first())) for prompt in prompts)
    assert context_for(llm, prompts, 40) == longest + 41
    assert context_for(llm, prompts, 10**6) == llm.model.max_context


def test_a_context_holds_a_second_turn(llm: LLM) -> None:
    prompts = [Prompt("0", "writing", ["hello", "and then?"])]
    context = context_for(llm, prompts, 12)
    plan = Plan([Suite("mine", prompts)], max_new_tokens=12)
    found = run(lambda _: [contender(llm, "plain", context)], plan, llm.tokenizer)
    assert [len(heat.answers["plain"][0].tokens) for heat in found.heats.values()] == [12, 12]
    assert max(len(heat.tasks[0].ids) for heat in found.heats.values()) + 12 < context


@pytest.mark.parametrize("grown", [False, True])
def test_a_trained_drafter_is_read_from_its_folder(
    grown: bool, folders: dict[str, Path], own_home: Path, tmp_path: Path
) -> None:
    original, wide = load_widened(folders["llama"], 2, device="cpu", max_context=256)
    saved.save(taught("medusa", original.model, heads=3, layers=2), tmp_path, original.model)
    llm = wide if grown else original
    truth = answer(contender(llm, "plain"), llm, 24)
    assert answer(contender(llm, f"medusa={tmp_path}", rows=8), llm, 24).tokens == truth.tokens
