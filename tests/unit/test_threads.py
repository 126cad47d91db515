"""Many threads call one LLM: each gets the output that it would get alone, and all share the batch."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

import foreword
from foreword.api import LLM
from foreword.engine.engine import Engine
from foreword.errors import InputError, QueueFull

pytestmark = pytest.mark.usefixtures("own_home")

PROMPTS = ("the words that come before the words", "hello", "a")
MANNERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.2, "top_k": 5, "seed": 1},
    {"repetition_penalty": 1.5},
    {"stop": "e"},
    {"logprobs": 2},
    {"min_new_tokens": 4, "temperature": 1.0, "seed": 2},
    {"reuse": False, "speculate": False},
)
Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [(prompt, {"max_new_tokens": 12, **manner}) for prompt in PROMPTS for manner in MANNERS]


@pytest.fixture(params=["plain", "prompt_lookup", "token_recycling", "amusd"])
def llm(request: pytest.FixtureRequest, folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    method = request.param
    drafter = folders["llama"] if method == "amusd" else None
    options = {"worker": "thread"} if method == "amusd" else {}
    with foreword.load(folders["llama"], method, drafter=drafter, rows=4, slots=3, **options) as loaded:
        yield loaded


@pytest.fixture
def plain(folders: dict[str, Path], own_home: Path) -> Iterator[LLM]:
    with foreword.load(folders["llama"], "plain", slots=2) as loaded:
        yield loaded


def by_generate(llm: LLM, case: Case) -> list[int]:
    return llm.generate(case[0], **case[1]).tokens


def by_list(llm: LLM, case: Case) -> list[int]:
    return llm.generate([case[0]] * 2, **case[1])[0].tokens


def by_stream(llm: LLM, case: Case) -> list[int]:
    return [token for piece in llm.stream(case[0], **case[1]) for token in piece.tokens]


def after_leaving_a_stream(llm: LLM, case: Case) -> list[int]:
    for _ in llm.stream("hello", max_new_tokens=40, ignore_eos=True):
        break
    return by_generate(llm, case)


WAYS: tuple[Callable[[LLM, Case], list[int]], ...] = (by_generate, by_list, by_stream, after_leaving_a_stream)


def test_threads_get_what_they_would_get_alone(llm: LLM) -> None:
    alone = {i: by_generate(llm, case) for i, case in enumerate(CASES)}
    order = [*range(len(CASES))] * 2
    Random(3).shuffle(order)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(WAYS[place % len(WAYS)], llm, CASES[i]) for place, i in enumerate(order)]
        found = [one.result(timeout=60) for one in asked]
    assert found == [alone[i] for i in order]
    assert not llm.engine.busy


def test_callers_share_the_batch(plain: LLM) -> None:
    """Two that wait at the same time run in the same rounds."""
    together = []

    def watch(engine: Engine, advance: Callable[[], None]) -> None:
        advance()
        together.append(len(engine.slots.running))

    engine = plain.engine
    advance = engine.advance
    engine.advance = lambda: watch(engine, advance)  # type: ignore[method-assign]
    barrier = threading.Barrier(2)

    def call(prompt: str) -> int:
        barrier.wait(timeout=10)
        return plain.generate(prompt, max_new_tokens=60, ignore_eos=True).stats.new_tokens

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(call, ["hello", "a"])] == [60, 60]
    assert 2 in together


def test_an_event_loop_may_call_from_its_threads(plain: LLM) -> None:
    alone = [by_generate(plain, case) for case in CASES[:8]]

    async def all_at_once() -> list[list[int]]:
        return await asyncio.gather(*(asyncio.to_thread(by_generate, plain, case) for case in CASES[:8]))

    assert asyncio.run(all_at_once()) == alone


def test_a_stream_that_nobody_reads_does_not_continue(plain: LLM) -> None:
    stream = plain.stream("hello", max_new_tokens=50, ignore_eos=True)
    next(iter(stream))
    written = len(stream._run.tokens)
    time.sleep(0.05)
    assert len(stream._run.tokens) == written < 50
    stream.close()


def broken_step(engine: Engine) -> None:
    def fail() -> None:
        raise MemoryError("no room")

    engine._admit = fail  # type: ignore[method-assign]


def test_a_broken_step_is_raised_for_every_caller_in_it(plain: LLM) -> None:
    broken_step(plain.engine)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(by_generate, plain, CASES[0]) for _ in range(3)]
        assert all(isinstance(one.exception(timeout=30), MemoryError) for one in asked)
    with pytest.raises(MemoryError):
        plain.generate(["a", "b"])
    del plain.engine._admit
    assert plain.generate("hello", max_new_tokens=2).stats.new_tokens == 2


def test_an_error_in_queueing_is_raised(plain: LLM) -> None:
    """The counts for a penalty are allocated when the first such request comes, and memory may run out."""

    def full() -> None:
        raise MemoryError

    plain.engine._count_tokens = full  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        plain.generate("hello", repetition_penalty=1.5)
    with pytest.raises(MemoryError):
        plain.generate(["a", "b"], repetition_penalty=1.5)
    assert plain.generate("hello", max_new_tokens=2).stats.new_tokens == 2


def test_what_waits_is_bounded(plain: LLM) -> None:
    """A longer list is still served if nothing else waits."""
    plain._driver.most_waiting = 3
    assert len(plain.generate(["a"] * 9, max_new_tokens=1)) == 9
    stream = plain.stream("hello", max_new_tokens=1)
    plain._driver.submit([plain.engine.checked(stream._run.request)])
    with pytest.raises(QueueFull, match="1 requests wait.*at most 3"):
        plain.generate(["a"] * 3, max_new_tokens=1)
    with plain._driver.claimed():
        plain._driver.give_up()
    assert plain.generate("a", max_new_tokens=1).stats.new_tokens == 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


@pytest.mark.parametrize("way", ["close", "use"])
def test_requests_in_progress_are_aborted_when_the_method_changes(way: str, plain: LLM) -> None:
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(plain.generate, "hello", max_new_tokens=400, ignore_eos=True)
        until(lambda: plain.engine.busy)
        plain.close() if way == "close" else plain.use("prompt_lookup")
        assert asked.result(timeout=30).finish_reason == "abort"
    if way == "close":
        with pytest.raises(InputError, match="closed"):
            plain.generate("hello")
    else:
        assert plain.generate("hello", max_new_tokens=3).method == "prompt_lookup"


def test_a_stream_of_a_closed_model_does_not_begin(plain: LLM) -> None:
    stream = plain.stream("hello")
    plain.close()
    with pytest.raises(InputError, match="closed"):
        list(stream)


def test_the_main_thread_steps_the_engine_itself(plain: LLM) -> None:
    """A second thread would bring a second set of OpenMP threads, which makes every product on the CPU slower."""
    plain.generate(["hello", "world"], max_new_tokens=3)
    list(plain.stream("hello", max_new_tokens=3))
    assert plain._driver._thread is None


def test_other_callers_continue_when_the_main_thread_has_its_result(plain: LLM) -> None:
    with ThreadPoolExecutor(1) as threads:
        stream = iter(plain.stream("hello", max_new_tokens=4, ignore_eos=True))
        next(stream)
        asked = threads.submit(plain.generate, "world", max_new_tokens=60, ignore_eos=True)
        rest = list(stream)
        assert len(asked.result(timeout=60).tokens) == 60
    assert rest and plain.generate("world", max_new_tokens=60, ignore_eos=True).tokens == asked.result().tokens


def test_the_thread_of_a_dropped_llm_ends(folders: dict[str, Path]) -> None:
    llm = foreword.load(folders["llama"], "plain")
    with ThreadPoolExecutor(1) as threads:
        threads.submit(llm.generate, "hello", max_new_tokens=2).result()
    thread, driver = llm._driver._thread, weakref.ref(llm._driver)
    assert thread is not None and thread.is_alive()
    del llm
    gc.collect()
    assert driver() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


LEFT_RUNNING = """
import sys, threading, time, foreword
llm = foreword.load(sys.argv[1], "plain", slots=1)
def forever():
    while True:
        llm.generate("hello", max_new_tokens=200, ignore_eos=True)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
"""


def test_a_process_ends_quietly_while_a_thread_still_generates(folders: dict[str, Path], own_home: Path) -> None:
    """The interpreter would stop the engine's thread inside torch, whose C++ frames then abort the process."""
    program = [sys.executable, "-c", LEFT_RUNNING, str(folders["llama"])]
    runs = [subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for run in runs:
        _, complaints = run.communicate(timeout=120)
        assert (run.returncode, b"terminate" in complaints) == (0, False), complaints
