"""Trials of new grammars: they keep no other request waiting, do not pile up, and are dropped when nobody waits for them."""

import asyncio
import json
from typing import Any

import pytest

from foreword.api import LLM
from foreword.errors import InputError
from foreword.serve import trials
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.errors import Refusal
from foreword.serve.trials import GrammarTrials
from foreword.text import grammar_check

CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "hello"}]


def bomb(number: int) -> dict[str, Any]:
    """Return a schema that takes minutes to compile."""
    return {"title": str(number), "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "COMPILE_S", 0.3)


def test_many_slow_grammars_are_refused_and_others_are_served(
    serving: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is tried, the others are told to come back. Requests without a grammar, or with a known one, go on."""
    monkeypatch.setattr(trials, "MOST_WAITING", 1)

    async def ask() -> Any:
        async with serving(max_queued=1000) as client:
            await client.chat(max_tokens=1, guided_regex="ab?")
            bodies = [{"messages": SAY, "guided_json": bomb(number)} for number in range(40)]
            slow = [asyncio.create_task(client.error(CHAT, body)) for body in bodies]
            await until(lambda: client.service.trials._waiting == 1)
            await client.chat(max_tokens=3)
            await client.chat(max_tokens=3, guided_regex="ab?")
            still = client.service.trials._waiting
            return still, await asyncio.gather(*slow)

    still, errors = asyncio.run(ask())
    assert still > 0
    found = [status for status, _ in errors]
    assert 1 <= found.count(400) <= 3 and found.count(400) + found.count(429) == 40
    for status, error in errors:
        assert ("takes more than 0.3 seconds" if status == 400 else "new grammars wait") in error["message"]
        assert error["param"] == ("guided_json" if status == 400 else None)


def settings(number: int) -> dict[str, Any]:
    return {"json_schema": json.dumps(bomb(number))}


def test_a_trial_that_nobody_waits_for_is_dropped(llm: LLM, until: Any) -> None:
    async def leave() -> None:
        async with AsyncLLM.of(llm) as engine:
            made = GrammarTrials(engine)
            tasks = [asyncio.create_task(made.passed(settings(number))) for number in range(1000, 1020)]
            await until(lambda: made._waiting == 20)
            for task in tasks[1:]:
                task.cancel()
            with pytest.raises(InputError, match="takes more than 0.3 seconds"):
                await tasks[0]
            await asyncio.get_running_loop().run_in_executor(made._thread, int)  # after them, if they were still there
            assert made._waiting == 0

    asyncio.run(leave())
    limits, tokenizer = AsyncLLM.of(llm).limits, llm.tokenizer
    vocabulary = tokenizer.grammar_vocabulary(limits.vocabulary, limits.ends)
    left = [grammar_check.GrammarSpec("json_schema", settings(number)["json_schema"]) for number in range(1001, 1020)]
    assert not any(grammar_check.is_checked(spec, vocabulary) for spec in left)


def test_a_client_that_leaves_frees_its_place(listening: Any, until: Any) -> None:
    """Its request waits for a trial, and no round has begun."""

    async def ask() -> None:
        async with listening() as (service, port):
            body = json.dumps({"messages": SAY, "guided_json": bomb(2000)}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await until(lambda: service.trials._waiting == 1)
            assert service.admission.inside == 1
            writer.close()
            await until(lambda: service.trials._waiting == service.admission.inside == 0)

    asyncio.run(ask())


def test_too_many_are_refused_before_they_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_WAITING", 0)

    async def ask() -> None:
        async with AsyncLLM.of(llm) as engine:
            made = GrammarTrials(engine)
            await made.passed({"temperature": 1.0, "regex": None})
            with pytest.raises(Refusal, match="new grammars wait") as caught:
                await made.passed({"regex": "abcd?"})
            assert caught.value.status == 429 and caught.value.headers["Retry-After"]

    asyncio.run(ask())
