"""Who is timed: all of them write the same text, and each counts its own rounds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import foreword
from doubles import READY, taught
from foreword.api import LLM
from foreword.bench import baseline, contender, context_for, run
from foreword.bench.grow import load_grown
from foreword.errors import InputError, UnknownMethod
from foreword.methods import saved
from foreword.text import Prompt

ASK = [{"role": "user", "content": "the words that come before the words that come before"}]


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=1) as loaded:
        yield loaded


@pytest.mark.parametrize("name", ["hf", "hf_lookup"])
def test_a_baseline_writes_the_tokens_of_plain(name: str, llm: LLM, folders: dict[str, Path]) -> None:
    plain = contender(llm, "plain").write([ASK], 40)[0]
    answer = baseline(name, llm, folders["llama"]).write([ASK], 40)[0]
    assert answer.tokens == plain.tokens and len(answer.tokens) == plain.rounds
    if name == "hf":
        assert answer.rounds == len(answer.tokens)


def test_the_rounds_of_a_baseline_are_its_passes(llm: LLM, folders: dict[str, Path]) -> None:
    """A random model falls into loops, which lookup finds: fewer passes than tokens. Each answer counts anew."""
    lookup = baseline("hf_lookup", llm, folders["llama"])
    answers = [lookup.write([ASK], 120)[0] for _ in range(2)]
    assert answers[0] == answers[1] and answers[0].rounds < len(answers[0].tokens)


def test_methods_have_caches_of_their_own(llm: LLM) -> None:
    """In turns on shared weights, as the loop runs them."""
    whole = llm.generate(ASK, max_new_tokens=16)
    contenders = [contender(llm, name, max_context=128) for name in READY]
    for _ in range(2):
        for one in contenders:
            answer = one.write([ASK], 16)[0]
            assert answer.tokens == whole.tokens and answer.prefill_s is not None and answer.prefill_s > 0
    assert llm.generate(ASK, max_new_tokens=16).tokens == whole.tokens and llm.method == "plain"


def test_a_method_takes_its_options(llm: LLM) -> None:
    assert contender(llm, "plain").name == "plain"
    wide = contender(llm, "prompt_lookup", rows=6).write([ASK], 60)[0]
    assert wide.rounds < len(wide.tokens)
    with pytest.raises(InputError, match="min_match"):
        contender(llm, "prompt_lookup", min_match=9)


def test_the_whole_way(llm: LLM, folders: dict[str, Path]) -> None:
    prompts = [Prompt(str(i), "qa", [text]) for i, text in enumerate(("hello", "the words"))]
    found = run([contender(llm, "plain"), baseline("hf", llm, folders["llama"])], prompts, max_new_tokens=8)
    assert all(timing.identical == 1 and timing.tokens == timing.rounds for timing in found.timings)


def test_a_model_without_a_chat_template_gets_the_string(
    llm: LLM, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer.hf, "chat_template", None)
    prompts = [Prompt("0", "qa", ["the words"])]
    context = context_for(llm, prompts, 8)
    assert context == len(llm.tokenizer.hf.encode("the words")) + 9
    found = run([contender(llm, "plain", context), baseline("hf", llm, folders["llama"])], prompts, max_new_tokens=8)
    assert [timing.identical for timing in found.timings] == [1, 1]


def test_nobody_of_that_name(llm: LLM, folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="'vllm'; there are: hf, hf_lookup"):
        baseline("vllm", llm, folders["llama"])
    with pytest.raises(UnknownMethod, match="did you mean 'plain'"):
        contender(llm, "plan")


def test_texts_side_by_side_are_those_of_one_at_a_time(llm: LLM) -> None:
    asked = [[{"role": "user", "content": f"the words that come before {i}"}] for i in range(5)]
    alone = contender(llm, "plain")
    texts = [alone.write([one], 12)[0].tokens for one in asked]
    for name in READY:
        together = contender(llm, name, max_context=128, slots=2)
        assert [answer.tokens for answer in together.write(asked, 12)] == texts
        together.close()


def test_a_context_holds_the_longest_answer_and_no_more(llm: LLM) -> None:
    prompts = [Prompt(str(i), "qa", [text]) for i, text in enumerate(("hello", "a much longer question than hello"))]
    longest = max(len(llm.tokenizer.encode(prompt.first())) for prompt in prompts)
    assert context_for(llm, prompts, 40) == longest + 41
    assert context_for(llm, prompts, 10**6) == llm.model.max_context
    found = run([contender(llm, "plain", context_for(llm, prompts, 40))], prompts, max_new_tokens=40)
    whole = run([contender(llm, "plain")], prompts, max_new_tokens=40)
    assert [one.tokens for one in found.timings] == [one.tokens for one in whole.timings]


@pytest.mark.parametrize("grown", [False, True])
def test_a_trained_drafter_is_read_from_its_folder(
    grown: bool, folders: dict[str, Path], own_home: Path, tmp_path: Path
) -> None:
    original, wide = load_grown(folders["llama"], 2, device="cpu", max_context=256)
    saved.save(taught("medusa", original.model, heads=3, layers=2), tmp_path, original.model)
    llm = wide if grown else original
    truth = contender(llm, "plain").write([ASK], 24)[0]
    answer = contender(llm, f"medusa={tmp_path}", rows=8).write([ASK], 24)[0]
    assert answer.tokens == truth.tokens
    if grown:
        baselined = baseline("hf", llm, folders["llama"]).write([ASK], 24)[0]
        assert baselined.tokens == truth.tokens
