"""Tasks of an event loop share one LLM: each gets the output of plain decoding, and a cancelled one frees its slot."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foreword
from foreword.api import LLM
from foreword.engine import emit
from foreword.engine.engine import Engine
from foreword.errors import InputError
from foreword.requests import Settings

pytestmark = pytest.mark.usefixtures("own_home")

PROMPTS = ("the words that come before the words", "hello", "a", "one two three", "the words")
MANNERS: tuple[Settings, ...] = ({}, {"temperature": 0.8, "seed": 4}, {"stop": "e"}, {"logprobs": 1}, {"reuse": False})
CASES: list[tuple[str, Settings]] = [(prompt, {"max_new_tokens": 8, **manner}) for prompt in PROMPTS for manner in MANNERS]
LONG: Settings = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], own_home: Path) -> list[list[int]]:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        return [llm.generate(prompt, **settings).tokens for prompt, settings in CASES]


@pytest.fixture(params=["plain", "token_recycling"])
def llm(request: pytest.FixtureRequest, folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], request.param, rows=None if request.param == "plain" else 4, slots=4) as loaded:
        yield loaded


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.001)


async def streamed(llm: LLM, prompt: str, settings: Settings) -> list[int]:
    stream = llm.astream(prompt, **settings)
    tokens = [token for piece in [one async for one in stream] for token in piece.tokens]
    assert (await stream.result()).tokens == tokens
    return tokens


def test_hundreds_of_tasks_get_the_output_of_plain(llm: LLM, expected: list[list[int]]) -> None:
    async def all_tasks() -> tuple[list[list[int]], int]:
        asked = [asyncio.create_task(llm.agenerate(prompt, **settings)) for prompt, settings in CASES * 10]
        streams = [asyncio.create_task(streamed(llm, prompt, settings)) for prompt, settings in CASES]
        await asyncio.sleep(0)
        threads = threading.active_count()
        written = [one.tokens for one in await asyncio.gather(*asked)]
        return [*written, *await asyncio.gather(*streams)], threads

    before = threading.active_count()
    found, threads = asyncio.run(all_tasks())
    assert found == expected * 11
    assert threads < before + 20  # no thread sleeps for a task
    assert not llm.engine.busy


def test_lists_and_samples_come_back_in_order(llm: LLM, expected: list[list[int]]) -> None:
    found = asyncio.run(llm.agenerate([CASES[0][0], CASES[5][0]], max_new_tokens=8))
    assert [one.tokens for one in found] == [expected[0], expected[5]]
    assert len(asyncio.run(llm.agenerate("hello", n=3, max_new_tokens=4))) == 3


@pytest.mark.parametrize("by", ["cancel", "timeout", "leaving", "closing"])
def test_an_aborted_request_frees_its_slot(folders: dict[str, Path], expected: list[list[int]], by: str) -> None:
    async def give_up(llm: LLM) -> None:
        stream = llm.astream("hello", **LONG)
        if by == "leaving":
            async for _ in stream:
                break
        elif by == "closing":
            await anext(aiter(stream))
            await stream.aclose()
        elif by == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.agenerate(["hello"] * 5, **LONG), 0.05)
        else:
            task = asyncio.create_task(llm.agenerate(["hello"] * 5, **LONG))
            await until(lambda: llm.engine.busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def main(llm: LLM) -> None:
        await give_up(llm)
        await until(lambda: not llm.engine.busy)
        assert (await llm.agenerate(CASES[0][0], **CASES[0][1])).tokens == expected[0]

    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        asyncio.run(main(llm))


def test_a_closed_event_loop_does_not_disturb_others(folders: dict[str, Path], expected: list[list[int]]) -> None:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        loop = asyncio.new_event_loop()
        task = loop.create_task(llm.agenerate("hello", max_new_tokens=60, ignore_eos=True))
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        assert llm.generate(CASES[0][0], **CASES[0][1]).tokens == expected[0]
        del task


def test_a_broken_step_reaches_its_task(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine) -> None:
        raise MemoryError("no more")

    with foreword.load(folders["llama"], "plain") as llm:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(Engine, "advance", broken)
            asyncio.run(llm.agenerate("hello"))
        with pytest.raises(InputError, match="no setting is called 'tempature'"):
            asyncio.run(llm.agenerate("hello", tempature=1))  # type: ignore[call-overload]
        assert asyncio.run(llm.agenerate("hello", max_new_tokens=2)).tokens


def test_what_is_published_is_complete(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may look while a step writes: an event has its log-probabilities from the start, the end comes last."""
    entries, looks = emit._logprobs, []

    def looking(*given: Any) -> Any:
        for run in llm.engine.slots.running.values():
            looks.append((run.done, all(len(event.logprobs) == len(event.tokens) for event in run.events)))
        return entries(*given)

    monkeypatch.setattr(emit, "_logprobs", looking)
    llm.generate("hello", max_new_tokens=12, temperature=0, logprobs=0)
    assert len(looks) > 2 and set(looks) == {(False, True)}
