"""Who is timed: our methods, on shared weights and, since one writes at a time, with caches in the same memory.
`baselines.py` has other people's decoding.

A contender writes the answers to tasks, as many side by side as it has slots, and says which tokens each round brought; the
clock is the benchmark's, not its own. Tasks are token ids: tokenizing and decoding are in nobody's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foreword.api import LLM
from foreword.core.sampling import Sampling
from foreword.drafters.resolve import Wanted
from foreword.engine.engine import Engine
from foreword.engine.request import Request, Running
from foreword.engine.warm_up import memory
from foreword.errors import ForewordError, PromptError
from foreword.methods import METHODS
from foreword.model.cache import SharedCacheMemory
from foreword.text import Prompt, Tokenizer


@dataclass(frozen=True)
class Task:
    """A text to write: the prompt that it answers, what stands before it, and its place in the run, which seeds it."""

    prompt: str
    ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True)
class Manner:
    """How everybody writes."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def sampling(self, task: Task) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed).derived(task.index)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    accepted: list[int] = field(default_factory=list)  # tokens that each round decided
    drafted: list[int] = field(default_factory=list)  # candidates that each round checked, where the contender can tell
    first_s: float | None = None  # until the first round's tokens were there
    failed: str | None = None  # why there is no answer

    @staticmethod
    def failure(error: BaseException) -> Answer:
        return Answer([], failed=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


@dataclass(frozen=True)
class Contender:
    name: str
    write: Callable[[Sequence[Task], Manner], list[Answer]]
    capture: Callable[[Sequence[Task], Manner], None] = lambda *_: None
    """Prepare for tasks such as these, so that nothing is captured or compiled while the clock runs."""
    ready: Callable[[], None] = lambda: None
    """Whatever it has to do before the clock of its turn runs."""
    forget: Callable[[], None] = lambda: None
    """Lose what was learned from texts: who has seen a prompt before knows the answer."""
    close: Callable[[], None] = lambda: None
    alone: bool = False  # writes greedily and one text at a time, nothing else


def contender(
    llm: LLM,
    method: str,
    max_context: int | None = None,
    slots: int = 1,
    graph: bool = True,
    cache_memory: SharedCacheMemory | None = None,
    **options: Any,
) -> Contender:
    """A method, or NAME=FOLDER for a trained drafter, on the weights of `llm`, `slots` texts side by side; its cache in a
    `cache_memory` that others may have, too."""
    own = LLM.of(llm.model.again(cache_memory), llm.tokenizer, Wanted.of(method, **options), slots, max_context, graph)
    engine = own.engine
    forget = memory(engine.drafter) if engine.drafter.learns else lambda: None

    def capture(tasks: Sequence[Task], manner: Manner) -> None:
        engine.take_berth()
        lengths = [min(len(task.ids), engine.max_context - 1) for task in tasks]
        engine.warm_up(min(lengths), max(lengths) + manner.max_new_tokens, manner.sampling(tasks[0]))

    def write(tasks: Sequence[Task], manner: Manner) -> list[Answer]:
        engine.take_berth()  # again, for who was not asked to be ready
        return written(engine, tasks, manner)

    return Contender(method, write, capture, engine.take_berth, forget, own.close)


def apart(names: Sequence[str], device: torch.device, gpus: int) -> list[str]:
    """Who should be timed in a run of its own: a draft that is written beside the target, on the one GPU there is, changes
    the pace of others' rounds in the same process (decision 24)."""
    return [name for name in names if METHODS[name].drafts_alongside] if device.type == "cuda" and gpus == 1 else []


def unable(name: str, error: Exception) -> Contender:
    """In the place of one that could not be made: it fails at everything, and says why."""

    def write(*_: object) -> list[Answer]:
        raise error

    return Contender(name, write)


def written(engine: Engine, tasks: Sequence[Task], manner: Manner) -> list[Answer]:
    """The answers of one of our engines. A task that cannot be begun, or that breaks, is a failed one; the others go on."""
    started = time.perf_counter()
    first: dict[int, float] = {}
    try:
        begun = [_begun(engine, task, manner) for task in tasks]
        unheard = [one for one in begun if isinstance(one, Running)]
        while engine.busy:
            engine.step_for(())
            if unheard:
                now = time.perf_counter() - started
                first |= {id(run): now for run in unheard if run.tokens}
                unheard = [run for run in unheard if not (run.tokens or run.done)]
    finally:
        engine.give_up()
    return [one if isinstance(one, Answer) else _answer(one, first.get(id(one))) for one in begun]


def _begun(engine: Engine, task: Task, manner: Manner) -> Running | Answer:
    try:
        return engine.add(Request(task.ids, manner.sampling(task), manner.max_new_tokens))
    except ForewordError as error:
        return Answer.failure(error)


def _answer(run: Running, first_s: float | None) -> Answer:
    return Answer.failure(run.error) if run.error else Answer(run.tokens, run.accepted, run.drafted, first_s)


def longest(tokenizer: Tokenizer, prompt: Prompt, max_new_tokens: int) -> int:
    """Tokens that may stand before a prompt's last answer: everything said and answered before. None, if it cannot be
    asked: that is told when it is its turn."""
    said: list[Any] = prompt.turns if prompt.answers > 1 else [prompt.first()]
    try:
        return sum(len(tokenizer.encode(one)) for one in said) + (max_new_tokens + SPARE) * (prompt.answers - 1)
    except PromptError:
        return 0


SPARE = 32  # tokens: a reply that is read back may be cut into more of them than it was written in


def context_for(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens that the longest answer may reach, its prompt included: what a cache must hold, and not more."""
    most = max(longest(llm.tokenizer, prompt, max_new_tokens) for prompt in prompts)
    return min(most + max_new_tokens + 1, llm.model.max_context)
