"""Trials of new grammars: they keep no other request waiting, do not pile up, and are dropped when nobody waits for them.

Where a test needs a slow trial, it takes the lock that trials take, and so decides how long they last."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foreword.api import LLM
from foreword.serve import trials
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.errors import Refusal
from foreword.serve.trials import GrammarTrials
from foreword.text import grammar_check
from foreword.text.grammar import GrammarSpec

CHAT = "/v1/chat/completions"
SAY = [{"role": "user", "content": "hello"}]
BOMB = {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}


@contextmanager
def slow() -> Iterator[None]:
    """Let no trial end during this block."""
    with grammar_check.CHECKER._lock:
        yield


def wrong(number: int) -> str:
    return f"trial {number} ("  # which no other test has tried


def test_many_new_grammars_do_not_pile_up(serving: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wait, the others are told to come back. Requests without a grammar, or with a known one, go on meanwhile."""
    monkeypatch.setattr(trials, "MOST_WAITING", 2)

    async def ask() -> Any:
        async with serving(max_queued=1000) as client:
            await client.chat(max_tokens=1, guided_regex="ab?")
            bodies = [{"messages": SAY, "guided_regex": wrong(number)} for number in range(200)]
            with slow():
                asked = [asyncio.create_task(client.error(CHAT, body)) for body in bodies]
                await until(lambda: sum(task.done() for task in asked) == 198)
                known = await client.chat(max_tokens=3, guided_regex="ab?")
                assert known["choices"][0]["message"]["content"] in ("a", "ab") and client.service.trials._waiting == 2
                await client.chat(max_tokens=3)
            return await asyncio.gather(*asked)

    errors = asyncio.run(ask())
    assert sorted(status for status, _ in errors) == [400] * 2 + [429] * 198
    for status, error in errors:
        assert ("regex cannot be used" if status == 400 else "2 new grammars wait") in error["message"]
        assert error["param"] == ("guided_regex" if status == 400 else None)


def test_a_trial_that_nobody_waits_for_is_dropped(llm: LLM, until: Any) -> None:
    async def leave() -> None:
        async with AsyncLLM.of(llm) as engine:
            made = GrammarTrials(engine)
            with slow():
                tasks = [asyncio.create_task(made.passed({"regex": "left0"}))]
                await until(lambda: made._waiting == 1)
                tasks += [asyncio.create_task(made.passed({"regex": f"left{number}"})) for number in range(1, 20)]
                await until(lambda: made._waiting == 20)
                for task in tasks[1:]:
                    task.cancel()
                await asyncio.gather(*tasks[1:], return_exceptions=True)
            await tasks[0]
            await asyncio.get_running_loop().run_in_executor(made._thread, int)  # after them, if they were still there
            assert made._waiting == 0

    asyncio.run(leave())
    limits = AsyncLLM.of(llm).limits
    vocabulary = llm.tokenizer.grammar_vocabulary(limits.vocabulary, limits.ends)
    tried = [grammar_check.is_checked(GrammarSpec("regex", f"left{number}"), vocabulary) for number in range(20)]
    assert tried == [True] + [False] * 19


def test_a_client_that_leaves_frees_its_place(listening: Any, until: Any) -> None:
    """Its request waits for a trial, and no round has begun."""

    async def ask() -> None:
        async with listening() as (service, port):
            body = json.dumps({"messages": SAY, "guided_regex": "abc?"}).encode()
            with slow():
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await until(lambda: service.trials._waiting == 1)
                assert service.admission.inside == 1
                writer.close()
                await until(lambda: service.trials._waiting == service.admission.inside == 0)

    asyncio.run(ask())


def test_a_trial_counts_towards_the_time_of_its_request(serving: Any) -> None:
    async def ask() -> Any:
        async with serving(request_seconds=0.2) as client:
            with slow():
                return await client.error(CHAT, {"messages": SAY, "guided_regex": "abcd?"})

    assert asyncio.run(ask())[0] == 504


def test_a_schema_that_takes_too_long_is_refused_by_its_field(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "COMPILE_S", 0.1)

    async def ask() -> Any:
        async with serving() as client:
            return await client.error(CHAT, {"messages": SAY, "guided_json": BOMB})

    status, error = asyncio.run(ask())
    assert status == 400 and error["param"] == "guided_json" and "takes more than 0.1 seconds" in error["message"]


def test_too_many_are_refused_before_they_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_WAITING", 0)

    async def ask() -> None:
        async with AsyncLLM.of(llm) as engine:
            made = GrammarTrials(engine)
            await made.passed({"temperature": 1.0, "regex": None})
            with pytest.raises(Refusal, match="new grammars wait") as caught:
                await made.passed({"regex": "abcde?"})
            assert caught.value.status == 429 and caught.value.headers["Retry-After"]

    asyncio.run(ask())
