"""POST /v1/chat/completions: the text of `llm.generate`, streamed or not, in chunks of OpenAI's shape."""

import asyncio
from typing import Any

import pytest

import foreword
from foreword.api import LLM

CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "the words that come before the words"}]
MANNERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 5, "top_k": 7, "min_p": 0.01, "frequency_penalty": 1.5, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 2, "logit_bias": {"90": 3, "91": -50}, "presence_penalty": -1},
    {"temperature": 0.7, "seed": 2, "speculate": False, "min_tokens": 20},
]


@pytest.fixture
def llm(knowing: LLM) -> LLM:
    return knowing


@pytest.fixture
def expected(expect: Any) -> Any:
    """Gives what `generate` answers to SAY."""
    return lambda manner, **more: expect(SAY, max_new_tokens=24, **manner, **more)


@pytest.mark.parametrize("manner", MANNERS, ids=str)
def test_streamed_text_is_whole_text_is_generated_text(
    serving: Any, expected: Any, joined: Any, manner: dict[str, Any]
) -> None:
    result = expected(manner)

    async def ask() -> tuple[Any, Any]:
        async with serving() as client:
            whole = await client.chat(messages=SAY, max_tokens=24, **manner)
            return whole, await client.chunks(CHAT, messages=SAY, max_completion_tokens=24, **manner)

    whole, chunks = asyncio.run(ask())
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    assert choice["finish_reason"] == result.finish_reason
    assert joined(chunks) == result.text
    assert whole["usage"]["completion_tokens"] == len(result.tokens)
    accepted, rounds = whole["foreword"]["accepted"], whole["foreword"]["rounds"]
    assert accepted == (0 if manner.get("speculate") is False else len(result.tokens) - rounds)
    assert accepted or manner.get("speculate") is False


def test_the_chunks_of_a_stream(serving: Any) -> None:
    async def ask() -> Any:
        async with serving() as client:
            return await client.chunks(CHAT, messages=SAY, max_tokens=6, stream_options={"include_usage": True})

    first, *middle, finish, usage, done = asyncio.run(ask())
    assert done == "data: [DONE]" and middle
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert {chunk["usage"] for chunk in (first, *middle, finish)} == {None}
    assert usage["foreword"]["rounds"] >= 1 and usage["timings"]["predicted_n"] == 6
    chunks = (first, *middle, finish, usage)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_only_where_it_was_asked_for(serving: Any) -> None:
    async def ask() -> Any:
        async with serving() as client:
            always = {"include_usage": True, "continuous_usage_stats": True}
            return await client.chunks(CHAT, messages=SAY, max_tokens=3), await client.chunks(
                CHAT, messages=SAY, max_tokens=3, stream_options=always
            )

    never, always = asyncio.run(ask())
    assert not [chunk for chunk in never[:-1] if "usage" in chunk]
    counts = [chunk["usage"]["completion_tokens"] for chunk in always[:-1]]
    assert counts == sorted(counts) and counts[-1] == 3


def test_samples_are_those_of_generate(serving: Any, expected: Any, joined: Any) -> None:
    """Each choice has its own role, text and end; the prompt counts once."""
    manner = {"temperature": 1.0, "seed": 3}

    async def ask() -> tuple[Any, Any]:
        async with serving() as client:
            given = {"messages": SAY, "max_tokens": 24, "n": 3, **manner}
            options = {"include_usage": True}
            return await client.chat(**given), await client.chunks(CHAT, stream_options=options, **given)

    results = expected(manner, n=3)
    whole, chunks = asyncio.run(ask())
    assert [choice["message"]["content"] for choice in whole["choices"]] == [one.text for one in results]
    assert [joined(chunks, index) for index in range(3)] == [one.text for one in results]
    assert len({one.text for one in results}) == 3
    assert whole["usage"]["prompt_tokens"] == results[0].stats.prompt_tokens == chunks[-2]["usage"]["prompt_tokens"]
    ends = [choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert len([end for end in ends if end]) == 3


def test_a_stop_string_inside_an_accepted_run_cuts_tokens_and_log_probabilities(
    serving: Any, expected: Any, joined: Any
) -> None:
    """Drafts are accepted past the stop string. Neither text nor tokens nor log-probabilities tell of it."""
    plain = expected({"temperature": 0})
    accepted = next(i for i in range(4, len(plain.text) - 4) if plain.text.find(plain.text[i : i + 2]) == i)
    stop = plain.text[accepted : accepted + 2]

    async def ask() -> tuple[Any, Any]:
        async with serving() as client:
            given = {"messages": SAY, "max_tokens": 24, "temperature": 0, "stop": stop, "logprobs": True, "top_logprobs": 2}
            given["return_token_ids"] = True
            return await client.chat(**given), await client.chunks(CHAT, **given)

    whole, chunks = asyncio.run(ask())
    result = expected({"temperature": 0}, stop=stop)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == result.text == joined(chunks)
    assert result.text == plain.text[:accepted] and choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["token_ids"] == result.tokens and len(result.tokens) < len(plain.tokens)
    assert len(choice["logprobs"]["content"]) == len(result.tokens)
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    assert [token for one in choices for token in one.get("token_ids", [])] == result.tokens
    entries = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert whole["foreword"]["accepted"] > 0


def test_log_probabilities_have_the_bytes_of_their_tokens(serving: Any, expected: Any) -> None:
    async def ask() -> Any:
        async with serving() as client:
            return await client.chat(messages=SAY, max_tokens=24, temperature=0, logprobs=True, top_logprobs=2)

    content = asyncio.run(ask())["choices"][0]["logprobs"]["content"]
    result = expected({"temperature": 0}, skip_special_tokens=False)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == result.text
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)


def test_the_first_chunk_has_the_tokens_of_the_prompt(serving: Any, llm: LLM) -> None:
    async def ask() -> Any:
        async with serving() as client:
            return await client.chunks(CHAT, messages=SAY, max_tokens=4, return_token_ids=True)

    first, *_ = asyncio.run(ask())
    assert first["prompt_token_ids"] == llm.tokenizer.encode(SAY)


def test_a_traced_stream_has_a_chunk_per_round(serving: Any, expected: Any) -> None:
    tokens = expected({"temperature": 0}).tokens

    async def ask() -> Any:
        async with serving() as client:
            options = {"include_usage": True}
            return await client.chunks(
                CHAT, messages=SAY, max_tokens=24, temperature=0, stream_options=options, trace_rounds=True
            )

    chunks = asyncio.run(ask())
    rounds = [chunk["foreword"]["tokens"] for chunk in chunks[:-2] if "foreword" in chunk]
    assert len(rounds) == chunks[-2]["foreword"]["rounds"]
    assert [token for one in rounds for token in one] == tokens
    assert max(map(len, rounds)) > 2


def test_what_the_template_is_given(serving: Any, llm: LLM) -> None:
    """A reply that is continued, and a prompt that no answer begins after."""
    begun = [*SAY, {"role": "assistant", "content": "the words"}]

    async def ask() -> tuple[Any, Any]:
        async with serving() as client:
            one = await client.chat(messages=begun, max_tokens=5, temperature=0, continue_final_message=True)
            return one, await client.chat(messages=SAY, max_tokens=5, temperature=0, add_generation_prompt=False)

    continued, bare = asyncio.run(ask())
    tokenizer = llm.tokenizer
    assert continued["usage"]["prompt_tokens"] == len(tokenizer.encode(begun)) - 2  # no </s>, no <|assistant|>
    assert bare["usage"]["prompt_tokens"] == len(tokenizer.encode(SAY)) - 1


def test_a_context_that_is_full_ends_the_output(serving: Any, talking: Any, hf_tokenizer: Any) -> None:
    """Without a limit, and with one that no context holds."""

    async def ask(llm: LLM) -> list[Any]:
        async with serving(llm) as client:
            limits: tuple[dict[str, Any], ...] = ({}, {"max_tokens": 10**30})
            return [await client.chat(messages=SAY, ignore_eos=True, **limit) for limit in limits]

    with foreword.wrap(talking("llama"), hf_tokenizer, "plain", slots=1, max_context=64) as short:
        room, answers = 64 - len(short.tokenizer.encode(SAY)), asyncio.run(ask(short))
    for whole in answers:
        assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["completion_tokens"] == room
        assert whole["choices"][0]["stop_reason"] == "context"


def test_reused_tokens_are_reported(serving: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "reuses", True)

    async def ask() -> Any:
        async with serving() as client:
            given = {"messages": SAY, "max_tokens": 4, "cache_salt": "mine"}
            await client.chat(**given)
            return await client.chat(**given)

    cached = asyncio.run(ask())["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0


def test_samples_share_their_prompt_and_sessions_are_taken(serving: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field names a session, or a header does. The prompt of three samples counts once, and was not cached."""
    said = [{"role": "user", "content": "hello " * 12}]
    given = {"messages": said, "max_tokens": 4, "n": 3, "cache_salt": "samples", "temperature": 0.8, "seed": 3}

    def kept() -> list[tuple[str, str]]:
        return list(llm.engine.slots.sessions.values())

    async def ask() -> Any:
        async with serving() as client:
            first = await client.chat(**given, reuse=True, prompt_cache_key="field")
            assert kept() == [("samples", "field")]
            alone = await client.chat(**given, reuse=False)
            named, short = {"X-Session-Id": "header"}, {"prompt": "x", "max_tokens": 2}
            await client.http.post("/v1/completions", json=short, headers=named)
            assert ("", "header") in kept()
            return first, alone, (await client.http.get("/metrics")).text

    first, alone, counts = asyncio.run(ask())
    assert [one["message"] for one in first["choices"]] == [one["message"] for one in alone["choices"]]
    prompt = first["usage"]["prompt_tokens"]
    assert prompt > 33 and first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert f'foreword:reused_tokens_total{{model_name="llama"}} {2 * (prompt - 1):.1f}' in counts
