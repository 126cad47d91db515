"""POST /v1/completions: texts and token ids as they are, several at once, echoed, with log-probabilities as lists."""

import asyncio
from typing import Any

import pytest

from foreword.api import LLM

PATH = "/v1/completions"
MANNER: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 4}
SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.8, "seed": 4, "chat": False}
IDS = [[70, 71, 72], [80, 81]]


def ask(serving: Any, **fields: Any) -> tuple[Any, Any]:
    """Return the whole answer and the chunks of a stream."""

    async def both() -> tuple[Any, Any]:
        async with serving() as client:
            answer = await client.post(PATH, fields)
            assert answer.status_code == 200, answer.text
            return answer.json(), await client.chunks(PATH, **fields)

    return asyncio.run(both())


@pytest.mark.parametrize("prompt", ["the words", ["the words", "hello"], IDS[0], IDS], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_the_texts_are_those_of_generate(serving: Any, llm: LLM, joined: Any, prompt: Any, n: int) -> None:
    """Choices are numbered prompt by prompt."""
    whole, chunks = ask(serving, prompt=prompt, n=n, **MANNER)
    asked = {"chat": False} if isinstance(prompt, str) or isinstance(prompt[0], str) else {}
    results = llm.generate(prompt, n=n, **{**SETTINGS, **asked})
    texts = [one.text for one in results]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    assert [joined(chunks, index) for index in range(len(texts))] == texts
    assert whole["usage"]["prompt_tokens"] == sum(one.stats.prompt_tokens for one in results[::n])
    assert whole["object"] == "text_completion" and {chunk["object"] for chunk in chunks[:-1]} == {"text_completion"}


def test_log_probabilities_as_lists(serving: Any, llm: LLM) -> None:
    whole, chunks = ask(serving, prompt="the words", logprobs=2, **MANNER)
    result = llm.generate("the words", logprobs=2, **SETTINGS)
    listed = whole["choices"][0]["logprobs"]
    assert listed["tokens"] == [entry.text for entry in result.logprobs]
    assert listed["token_logprobs"] == pytest.approx([entry.logprob for entry in result.logprobs], abs=1e-4)
    offsets = [sum(map(len, listed["tokens"][:place])) for place in range(len(listed["tokens"]))]
    assert listed["text_offset"] == offsets
    streamed = [choice["logprobs"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["logprobs"]]
    assert [token for one in streamed for token in one["tokens"]] == listed["tokens"]
    assert [offset for one in streamed for offset in one["text_offset"]] == offsets


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_prompt_is_echoed(serving: Any, llm: LLM, joined: Any, logprobs: int | None) -> None:
    fields = {} if logprobs is None else {"logprobs": logprobs}
    whole, chunks = ask(serving, prompt=["the words", "hello"], echo=True, **MANNER, **fields)
    results = llm.generate(["the words", "hello"], prompt_logprobs=1, **SETTINGS)
    for index, (choice, result, prompt) in enumerate(zip(whole["choices"], results, ("the words", "hello"), strict=True)):
        assert choice["text"] == joined(chunks, index) == prompt + result.text
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        listed = choice["logprobs"]
        read = len(result.prompt_logprobs)
        assert listed["tokens"][:read] == list(prompt) and len(listed["tokens"]) == read + len(result.tokens)
        assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
        known = [entry.logprob for entry in result.prompt_logprobs[1:]]
        assert listed["token_logprobs"][1:read] == pytest.approx(known, abs=1e-4)
        streamed = [one for chunk in chunks[:-1] for one in chunk["choices"] if one["index"] == index and one["logprobs"]]
        assert [token for one in streamed for token in one["logprobs"]["tokens"]] == listed["tokens"]


def test_the_default_is_openais(serving: Any) -> None:
    whole, _ = ask(serving, prompt="hello", ignore_eos=True, return_token_ids=True)
    (choice,) = whole["choices"]
    assert whole["usage"]["completion_tokens"] == 16 == len(choice["token_ids"])
    assert choice["finish_reason"] == "length" and len(choice["prompt_token_ids"]) == 5


def test_options_act_on_draft_tokens(serving: Any, llm: LLM) -> None:
    """The prediction is what greedy decoding writes, so its tokens are drafted. Options that bar some of them bar them in a
    draft too, and one that leaves nothing else accepts them all."""
    letters = [token for token in range(llm.engine.limits.vocabulary) if llm.tokenizer.token_text(token).isalpha()]
    letters = [token for token in letters if llm.tokenizer.token_text(token).isascii()]  # whose text has the same tokens
    ids = llm.tokenizer.encode("hello", chat=False)
    settings: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": letters}
    greedy = llm.generate(ids, max_new_tokens=24, **settings)
    barred = greedy.tokens[5]
    manners: dict[str, dict[str, Any]] = {
        "min_p": {"temperature": 2.0, "min_p": 0.99999, "seed": 3},
        "hot": {"temperature": 2.0, "seed": 3},
        "logit_bias": {"logit_bias": {str(barred): -100}},
        "bad_words": {"bad_words": [greedy.text[4:6]]},
        "allowed_token_ids": {"allowed_token_ids": [one for one in letters if one != barred]},
    }
    prediction = {"type": "content", "content": greedy.text}
    common = {**settings, "prompt": ids, "max_tokens": 24, "return_token_ids": True, "prediction": prediction}

    async def answers_to(client: Any, manner: dict[str, Any]) -> list[Any]:
        return [(await client.post(PATH, {**common, **manner, "speculate": one})).json() for one in (True, False)]

    async def ask_all() -> dict[str, list[Any]]:
        async with serving() as client:
            return {name: await answers_to(client, manner) for name, manner in manners.items()}

    found = asyncio.run(ask_all())
    tokens = {name: [answer["choices"][0]["token_ids"] for answer in answers] for name, answers in found.items()}
    assert all(drafted == plain for drafted, plain in tokens.values())
    assert all(answers[0]["foreword"]["drafted"] and not answers[1]["foreword"]["drafted"] for answers in found.values())
    assert tokens["min_p"][0] == greedy.tokens and tokens["hot"][0] != greedy.tokens
    assert found["min_p"][0]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 12
    assert barred not in tokens["logit_bias"][0] + tokens["allowed_token_ids"][0]
    assert tokens["bad_words"][0][:6] != greedy.tokens[:6]
