"""Contenders generate the same output, count their rounds, and forget what they must not know."""

import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foreword
from doubles import WITHOUT_WEIGHTS, with_random_weights
from foreword.api import LLM
from foreword.bench import Contender, GenerationSettings, Plan, Suite, Task, contender, context_for, run
from foreword.bench.contenders import needs_own_run
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

PROMPT = "the words that come before the words that come before"


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1) as loaded:
        yield loaded


def task(llm: LLM, prompt: str = PROMPT, index: int = 0) -> Task:
    return Task(str(index), tuple(llm.tokenizer.encode(prompt)), index)


def answer(one: Contender, llm: LLM, tokens: int, **more: Any) -> Any:
    return one.write([task(llm)], GenerationSettings(tokens, **more))[0]


@pytest.mark.parametrize(
    ("device", "gpus", "expected"), [("cuda", 1, ["amusd"]), ("cuda", 2, []), ("cpu", 1, []), ("cpu", 0, [])]
)
def test_methods_that_draft_alongside_on_a_single_gpu_need_their_own_run(
    device: str, gpus: int, expected: list[str]
) -> None:
    assert needs_own_run(list(METHODS), torch.device(device), gpus) == expected


def test_the_drift_check_runs_only_where_passes_are_replayed(llm: LLM) -> None:
    found = drift_check(llm.model)
    assert list(found) == (list(DRIFT_ROWS) if llm.model.device.type == "cuda" else []) and all(
        ms > 0 for ms in found.values()
    )
    assert len(llm.generate(PROMPT, max_new_tokens=4).tokens) == 4  # and the model still works


def test_methods_have_caches_of_their_own(llm: LLM) -> None:
    """They take turns on shared weights, as in the measuring loop."""
    whole = llm.generate(PROMPT, max_new_tokens=16)
    contenders = [contender(llm, name, max_context=128) for name in WITHOUT_WEIGHTS]
    for _ in range(2):
        for one in contenders:
            found = answer(one, llm, 16)
            assert found.tokens == whole.tokens and 0 < found.first_s < 60
            assert sum(found.accepted) == 16 and len(found.drafted) == len(found.accepted)
    assert llm.generate(PROMPT, max_new_tokens=16).tokens == whole.tokens and llm.method == "plain"


def test_methods_may_have_caches_in_the_same_memory(llm: LLM, tmp_path: Path) -> None:
    """What one leaves there does not affect the next; one method also has layers with a cache of their own."""
    saved.save(with_random_weights("clover2", llm.model, heads=3), tmp_path, llm.model)
    whole, cache_memory = llm.generate(PROMPT, max_new_tokens=16), SharedCacheMemory()
    names = [*WITHOUT_WEIGHTS, f"clover2={tmp_path}"]
    contenders = [contender(llm, name, max_context=128, slots=2, cache_memory=cache_memory) for name in names]
    memory = cache_memory._numbers
    for _ in range(2):
        for one in contenders:
            assert answer(one, llm, 16).tokens == whole.tokens
            assert memory is cache_memory._numbers and memory is not None and memory.any()  # no contender has other memory
            memory.fill_(math.nan)


def test_shared_cache_memory_ends_with_its_contenders(llm: LLM) -> None:
    """A benchmark makes the contenders of the next batch size after the memory of the last one is free."""
    held: list[Callable[[], SharedCacheMemory | None]] = []

    def make_for(count: int) -> list[Contender]:
        assert not any(one() for one in held)
        cache_memory = SharedCacheMemory()
        held.append(weakref.ref(cache_memory))
        return [contender(llm, name, 128, count, cache_memory=cache_memory) for name in ("plain", "prompt_lookup")]

    plan = Plan([Suite("mine", [Prompt(str(i), "qa", [PROMPT]) for i in range(4)])], 4, (1, 4, 2))
    run(make_for, plan, llm.tokenizer)
    assert len(held) == 3


def test_a_prompt_is_not_reused_from_memory_that_another_engine_used(llm: LLM) -> None:
    cache_memory = SharedCacheMemory()
    models = [Model(llm.model.hf, cache_memory=cache_memory) for _ in range(2)]
    first, other = (Engine(model, make("plain"), 1, 64) for model in models)
    request = Request(task(llm).ids, Sampling(), 8, reuse=True)
    first.claim_cache()
    assert [first.generate([request])[0].reused > 0 for _ in range(2)] == [False, True]
    other.claim_cache()
    other.generate([request])
    first.claim_cache()
    (again,) = first.generate([request])
    assert not again.reused and again.tokens == llm.generate(PROMPT, max_new_tokens=8).tokens
    first.add(request)
    with pytest.raises(AssertionError, match="running requests"):
        first.claim_cache()
    for model in models:
        model.release()


def test_sampled_outputs_equal_those_of_plain(llm: LLM) -> None:
    settings, asked = GenerationSettings(24, temperature=0.9, seed=3), [task(llm, PROMPT, i) for i in range(3)]
    plain = [one.tokens for one in contender(llm, "plain", slots=2).write(asked, settings)]
    assert len({tuple(tokens) for tokens in plain}) == 3  # the same prompt, different samples
    for name in WITHOUT_WEIGHTS:
        assert [one.tokens for one in contender(llm, name).write(asked, settings)] == plain


def test_a_method_takes_its_options(llm: LLM) -> None:
    assert contender(llm, "plain").name == "plain"
    wide = answer(contender(llm, "prompt_lookup", rows=6), llm, 60)
    assert len(wide.accepted) < len(wide.tokens)
    with pytest.raises(InputError, match="min_match"):
        contender(llm, "prompt_lookup", min_match=9)
    with pytest.raises(UnknownMethod, match="did you mean 'plain'"):
        contender(llm, "plan")


def test_a_method_that_learns_can_forget(llm: LLM) -> None:
    """The second time it knows the output; after forgetting, it needs as many rounds as at first."""
    learner = contender(llm, "token_recycling", rows=16)
    first, again = answer(learner, llm, 60), answer(learner, llm, 60)
    assert len(again.accepted) < len(first.accepted)
    learner.forget()
    assert answer(learner, llm, 60).accepted == first.accepted


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM) -> None:
    one = contender(llm, "plain", max_context=64, slots=2)
    asked = [task(llm, "hello"), task(llm, "long " * 40, 1), task(llm, "words", 2)]
    answers = one.write(asked, GenerationSettings(8))
    assert [bool(found.failed) for found in answers] == [False, True, False]
    assert "PromptError: the prompt has" in answers[1].failed and len(answers[2].tokens) == 8


def test_a_target_that_returns_nan_has_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one = contender(llm, "plain", max_context=128)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model.hf.model.norm.weight, "data", torch.full_like(llm.model.hf.model.norm.weight, torch.nan))
        found = answer(one, llm, 8)
    assert found.failed and "NaN" in found.failed
    assert not answer(one, llm, 8).failed


def test_outputs_in_a_batch_equal_those_of_batch_1(llm: LLM) -> None:
    asked = [task(llm, f"the words that come before {i}", i) for i in range(5)]
    alone = contender(llm, "plain")
    outputs = [alone.write([one], GenerationSettings(12))[0].tokens for one in asked]
    for name in WITHOUT_WEIGHTS:
        together = contender(llm, name, max_context=128, slots=2)
        assert [found.tokens for found in together.write(asked, GenerationSettings(12))] == outputs
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
    assert [len(block_run.answers["plain"][0].tokens) for block_run in found.block_runs.values()] == [12, 12]
    assert max(len(block_run.tasks[0].ids) for block_run in found.block_runs.values()) + 12 < context


@pytest.mark.parametrize("widened", [False, True])
def test_a_trained_drafter_is_read_from_its_folder(
    widened: bool, folders: dict[str, Path], own_home: Path, tmp_path: Path
) -> None:
    original, wide = load_widened(folders["llama"], 2, device="cpu", max_context=256)
    saved.save(with_random_weights("medusa", original.model, heads=3, layers=2), tmp_path, original.model)
    llm = wide if widened else original
    truth = answer(contender(llm, "plain"), llm, 24)
    assert answer(contender(llm, f"medusa={tmp_path}", rows=8), llm, 24).tokens == truth.tokens
