"""What is timed: our methods. They share the weights and, because they run one at a time, the memory of their caches.
`baselines.py` has the other decoders.

A contender answers tasks, as many at a time as it has slots, and reports how many tokens each round decided. The benchmark
holds the clock. Tasks are token ids, so tokenizing and detokenizing are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.drafters.resolve import DrafterRequest
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.engine.warm_up import snapshot
from foreword.errors import ForewordError, PromptError
from foreword.methods import METHODS
from foreword.model.cache import SharedCacheMemory
from foreword.text import Prompt, Tokenizer


@dataclass(frozen=True)
class Task:
    """A prompt to answer: its name, its token ids, and its index in the run, which seeds the sampling."""

    prompt: str
    ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True)
class GenerationSettings:
    """The settings that all contenders share."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def sampling(self, task: Task) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed).derived(task.index)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    accepted: list[int] = field(default_factory=list)  # tokens that each round decided
    drafted: list[int] = field(default_factory=list)  # candidates that each round verified, if known
    first_s: float | None = None  # seconds until the first round's tokens
    failed: str | None = None  # why there is no answer

    @staticmethod
    def failure(error: BaseException) -> Answer:
        return Answer([], failed=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


@dataclass(frozen=True)
class Contender:
    name: str
    write: Callable[[Sequence[Task], GenerationSettings], list[Answer]]
    capture: Callable[[Sequence[Task], GenerationSettings], None] = lambda *_: None
    """Prepare for such tasks, so that nothing is captured or compiled while the clock runs."""
    ready: Callable[[], None] = lambda: None
    """Prepare for a turn, before the clock starts."""
    forget: Callable[[], None] = lambda: None
    """Drop what was learned from earlier outputs: a drafter that has seen a prompt knows the answer."""
    close: Callable[[], None] = lambda: None
    greedy_single: bool = False  # can only decode greedily, at batch 1


def contender(
    llm: LLM,
    method: str,
    max_context: int | None = None,
    slots: int = 1,
    graph: bool = True,
    cache_memory: SharedCacheMemory | None = None,
    **options: Any,
) -> Contender:
    """Make the contender of a method, or of NAME=FOLDER for a trained drafter, on the weights of `llm`, with `slots` slots.
    Its cache lies in `cache_memory`, which contenders may share."""
    own = LLM.of(
        llm.model.with_own_cache(cache_memory),
        llm.tokenizer,
        DrafterRequest.of(method, **options),
        slots,
        max_context,
        graph,
    )
    engine = own.engine
    forget = snapshot(engine.drafter) if engine.drafter.learns else lambda: None

    def capture(tasks: Sequence[Task], settings: GenerationSettings) -> None:
        engine.claim_cache()
        lengths = [min(len(task.ids), engine.max_context - 1) for task in tasks]
        engine.warm_up(min(lengths), max(lengths) + settings.max_new_tokens, settings.sampling(tasks[0]))

    def write(tasks: Sequence[Task], settings: GenerationSettings) -> list[Answer]:
        engine.claim_cache()  # again, in case `ready` was not called
        return generate_answers(engine, tasks, settings)

    return Contender(method, write, capture, engine.claim_cache, forget, own.close)


def needs_own_run(names: Sequence[str], device: torch.device, gpus: int) -> list[str]:
    """Return the methods to time in a run of their own: drafting alongside the target on a single GPU changes the speed of
    the other contenders' rounds in the same process (decision 24)."""
    return [name for name in names if METHODS[name].drafts_alongside] if device.type == "cuda" and gpus == 1 else []


def failing_contender(name: str, error: Exception) -> Contender:
    """Stand in for a contender that could not be made: it fails at every task with this error."""

    def write(*_: object) -> list[Answer]:
        raise error

    return Contender(name, write)


def generate_answers(engine: Engine, tasks: Sequence[Task], settings: GenerationSettings) -> list[Answer]:
    """Answer tasks with one of our engines. A task that fails gets a failed answer; the others go on."""
    started = time.perf_counter()
    first: dict[int, float] = {}
    try:
        begun = [_begin(engine, task, settings) for task in tasks]
        waiting = [one for one in begun if isinstance(one, Running)]  # for their first tokens
        while engine.busy:
            engine.step_for(())
            if waiting:
                now = time.perf_counter() - started
                first |= {id(run): now for run in waiting if run.tokens}
                waiting = [run for run in waiting if not (run.tokens or run.done)]
    finally:
        engine.give_up()
    return [one if isinstance(one, Answer) else _answer(one, first.get(id(one))) for one in begun]


def _begin(engine: Engine, task: Task, settings: GenerationSettings) -> Running | Answer:
    try:
        return engine.add(Request(task.ids, settings.sampling(task), settings.max_new_tokens))
    except ForewordError as error:
        return Answer.failure(error)


def _answer(run: Running, first_s: float | None) -> Answer:
    return Answer.failure(run.error) if run.error else Answer(run.tokens, run.accepted, run.drafted, first_s)


def longest_prompt(tokenizer: Tokenizer, prompt: Prompt, max_new_tokens: int) -> int:
    """Return the most tokens that may come before a prompt's last answer: all turns and earlier answers. 0 if the prompt
    cannot be encoded; that is reported when it is asked."""
    turns: list[Any] = prompt.turns if prompt.answers > 1 else [prompt.first()]
    try:
        return sum(len(tokenizer.encode(one)) for one in turns) + (max_new_tokens + SPARE) * (prompt.answers - 1)
    except PromptError:
        return 0


SPARE = 32  # tokens: a reply that is tokenized again may have more of them


def context_for(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Return the context that a cache must hold: the longest prompt and its answer."""
    most = max(longest_prompt(llm.tokenizer, prompt, max_new_tokens) for prompt in prompts)
    return min(most + max_new_tokens + 1, llm.model.max_context)
