"""AsyncLLM: the same output as `LLM`, with the engine in another process; what happens when that process dies."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import foreword
from foreword.errors import EngineError, InputError, ModelNotFound, UnknownMethod
from foreword.requests import Settings
from foreword.results import Piece, Result
from foreword.serve.async_llm import AsyncLLM
from foreword.serve.client import EngineClient

pytestmark = pytest.mark.usefixtures("own_home")

PROMPTS = ("the words that come before the words", "hello", "a")
MANNERS: tuple[Settings, ...] = (
    {},
    {"temperature": 0.8, "seed": 4},
    {"stop": "e"},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stop_token_ids": [50, 60, 70], "logit_bias": {40: 2.0}, "bad_words": ["x"]},
    {"speculate": False, "allowed_token_ids": list(range(30, 90))},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"regex": "(no|yes)+, [a-z]*", "temperature": 0.8},
)
CASES: list[tuple[str, Settings]] = [
    (prompt, {"max_new_tokens": 8, "seed": 1, **manner}) for prompt in PROMPTS for manner in MANNERS
]
LONG: Settings = {"max_new_tokens": 400, "ignore_eos": True}


def said(result: Result) -> dict[str, Any]:
    """A result without its times and without how it was drafted."""
    found = result.to_dict()
    del found["stats"], found["method"], found["model"]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal. Passes of other sizes round log-probabilities differently."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == pytest.approx(other, abs=1e-4)) if isinstance(one, float) else bool(one == other)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], own_home: Path) -> list[dict[str, Any]]:
    with foreword.load(folders["llama"], "plain", slots=1) as llm:
        return [said(llm.generate(prompt, **settings)) for prompt, settings in CASES]


class Loop:
    """An event loop that keeps running in a thread, so that tests share one engine process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def __call__(self, work: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module", params=["in another process", "in this process"])
def llm(request: pytest.FixtureRequest, folders: dict[str, Path], own_home: Path, run: Loop) -> Iterator[AsyncLLM]:
    if request.param == "in this process":
        with foreword.load(folders["llama"], "token_recycling", rows=4, slots=4) as inner:
            found = run(AsyncLLM.of(inner).start())
            yield found
            run(found.close())
        return
    found = run(AsyncLLM(folders["llama"], "token_recycling", rows=4, slots=4).start())
    yield found
    run(found.close())


async def streamed(llm: AsyncLLM, prompt: str, settings: Settings) -> Result:
    stream = llm.astream(prompt, **settings)
    pieces = [piece async for piece in stream]
    result = await stream.result()
    assert "".join(pieces) == result.text
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    if result.logprobs is not None:
        assert [one for piece in pieces for one in piece.logprobs] == result.logprobs
    return result


async def gathered(works: list[Awaitable[Result]]) -> list[Result]:
    return await asyncio.gather(*works)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.005)


async def is_idle(llm: AsyncLLM) -> bool:
    """Whether the engine soon says that nothing runs."""
    await until(lambda: llm.health.load.running + llm.health.load.waiting == 0)
    return True


def test_many_tasks_get_the_output_of_plain(llm: AsyncLLM, run: Loop, expected: list[dict[str, Any]]) -> None:
    asked: list[Awaitable[Result]] = [llm.agenerate(prompt, **settings) for prompt, settings in CASES * 3]
    found = run(gathered(asked + [streamed(llm, prompt, settings) for prompt, settings in CASES]))
    assert same([said(one) for one in found], expected * 4)
    assert any(one.stats.tokens_per_round > 1 for one in found)
    assert all(one.stats.rounds and one.stats.decode_s > 0 and one.stats.prefill_s > 0 for one in found)
    assert run(is_idle(llm))


def test_lists_and_samples_come_in_order(llm: AsyncLLM, run: Loop, expected: list[dict[str, Any]]) -> None:
    found = run(llm.agenerate([CASES[0][0], CASES[len(MANNERS)][0]], max_new_tokens=8))
    assert [one.tokens for one in found] == [expected[0]["tokens"], expected[len(MANNERS)]["tokens"]]
    assert len(run(llm.agenerate("hello", n=3, max_new_tokens=4))) == 3


def test_a_cancelled_request_frees_its_slot(llm: AsyncLLM, run: Loop) -> None:
    async def give_up() -> bool:
        asked = [asyncio.create_task(llm.agenerate("hello", **LONG)) for _ in range(6)]
        stream = llm.astream("hello", **LONG)
        await anext(aiter(stream))
        await stream.aclose()
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return await is_idle(llm)

    assert run(give_up())


def test_wrong_requests_are_refused_before_they_are_sent(llm: AsyncLLM, run: Loop) -> None:
    with pytest.raises(InputError, match="no setting is called 'tempature'"):
        run(llm.agenerate("hello", tempature=1))  # type: ignore[call-overload]
    with pytest.raises(InputError, match="context"):
        run(llm.agenerate("hello " * 600))


def test_the_method_can_be_changed(llm: AsyncLLM, run: Loop, expected: list[dict[str, Any]]) -> None:
    run(llm.use("prompt_lookup", rows=4))
    assert llm.method == "prompt_lookup"
    with pytest.raises(UnknownMethod):
        run(llm.use("promptlookup"))
    prompt, settings = CASES[0]
    assert same(said(run(llm.agenerate(prompt, **settings))), expected[0])
    run(llm.use("token_recycling", rows=4))


def test_predictions_and_traces_come_from_either_process(llm: AsyncLLM, run: Loop) -> None:
    async def streamed_with(prediction: list[int], **more: Any) -> tuple[list[Piece], Result]:
        asked = {"max_new_tokens": 8, "ignore_eos": True, "prediction": prediction, "trace_rounds": True}
        stream = llm.astream("hello", **asked, **more)
        return [piece async for piece in stream], await stream.result()

    run(llm.use("prompt_lookup", rows=4))
    _, plain = run(streamed_with([]))
    pieces, result = run(streamed_with(plain.tokens))
    assert result.tokens == plain.tokens and [len(piece.tokens) for piece in pieces] == [4, 4]
    assert (result.stats.accepted_prediction_tokens, result.stats.rejected_prediction_tokens) == (6, 2)
    for piece in pieces:
        assert piece.draft is not None and piece.draft.next == piece.tokens[-1] and piece.draft.path == [0, 1, 2, 3]
        assert piece.draft.texts == [*map(llm.tokenizer.token_text, piece.draft.tokens)]
    _, cut = run(streamed_with(plain.tokens, stop=next(one for one in plain.text if one.isascii() and one.isprintable())))
    rounds, rest = divmod(len(cut.tokens), 4)
    assert rest and cut.finish_reason == "stop", "a stop string ends it in the middle of a round"
    assert cut.stats.accepted_prediction_tokens == 3 * rounds + rest, "tokens after it do not count"
    run(llm.use("token_recycling", rows=4))


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, run: Loop) -> None:
    with pytest.raises(ModelNotFound):
        run(AsyncLLM(tmp_path / "none").start())
    with pytest.raises(UnknownMethod, match="no method"):
        run(EngineClient({"model": None, "method": "guessing"}).start())
    with pytest.raises(InputError, match="name or a folder"):
        AsyncLLM(method=object())  # type: ignore[arg-type]


def test_an_engine_that_dies_ends_its_requests_and_is_started_again(
    folders: dict[str, Path], run: Loop, expected: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    async def kill(llm: AsyncLLM, client: EngineClient, how: signal.Signals, silence_s: float) -> None:
        assert client._process is not None
        stream = llm.astream("hello", **LONG)
        pieces = aiter(stream)
        await anext(pieces)
        waiting = asyncio.create_task(llm.agenerate("hello", **LONG))
        client.silence_s = silence_s
        await anext(pieces)  # the time is read when a message comes
        os.kill(client._process.pid, how)  # one that is stopped is silent
        with pytest.raises(EngineError, match="ended"):
            async for _ in pieces:
                pass
        with pytest.raises(EngineError, match="ended"):
            await waiting

    async def be_slow_after_a_pause(llm: AsyncLLM, client: EngineClient) -> None:
        """An engine with nothing to do is silent. That does not count against the request that comes then."""
        assert client._process is not None
        await llm.agenerate("hello", max_new_tokens=1)
        client.silence_s = 2.0
        await llm.agenerate("hello", max_new_tokens=1)
        await asyncio.sleep(1.4)
        os.kill(client._process.pid, signal.SIGSTOP)
        late = asyncio.create_task(llm.agenerate("hello", max_new_tokens=1))
        await asyncio.sleep(1.2)
        os.kill(client._process.pid, signal.SIGCONT)
        await late

    async def main() -> None:
        async with AsyncLLM(folders["llama"], "plain", slots=1, restarts=1) as llm:
            client = llm._transport
            assert isinstance(client, EngineClient)
            await be_slow_after_a_pause(llm, client)
            await kill(llm, client, signal.SIGSTOP, 0.5)
            client.silence_s = 60.0
            await until(lambda: llm.health.state == "ready")
            assert same(said(await llm.agenerate(CASES[0][0], **CASES[0][1])), expected[0])
            await kill(llm, client, signal.SIGKILL, 60.0)
            await until(lambda: llm.health.state == "dead")
            with pytest.raises(EngineError, match="dead"):
                await llm.agenerate("hello")

    run(main())
