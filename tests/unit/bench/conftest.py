"""Stub contenders and prompts for the measuring loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foreword.bench import Answer, Contender, GenerationSettings, Plan, Suite, Task, run
from foreword.bench.run import RunResults
from foreword.cli.app import app
from foreword.text import Prompt, Tokenizer

Diary = list[tuple[str, str, int]]


@dataclass
class Stub:
    """Return a given answer and note each call in a shared diary; fail at the prompts of `fails_at`."""

    name: str
    diary: Diary
    tokens: list[int]
    rounds: int
    fails_at: tuple[str, ...] = ()
    seen: list[Task] = field(default_factory=list)

    def __call__(self, tasks: Sequence[Task], settings: GenerationSettings) -> list[Answer]:
        self.diary += [(self.name, task.prompt, settings.max_new_tokens) for task in tasks]
        self.seen += tasks
        if any(task.prompt in self.fails_at for task in tasks) and settings.max_new_tokens > 8:
            raise RuntimeError("out of paper")
        each, more = divmod(len(self.tokens), self.rounds)
        accepted = [each + (place < more) for place in range(self.rounds)]
        return [Answer(self.tokens, accepted, [3] * self.rounds, 0.25)] * len(tasks)


@pytest.fixture
def diary() -> Diary:
    return []


@pytest.fixture
def stub(diary: Diary) -> Callable[..., Contender]:
    """Make a contender that answers at once: stub("plain", [1, 2, 3], rounds=3)."""

    def make(name: str, tokens: Sequence[int] = (11, 12, 13), rounds: int = 3, fails_at: Any = (), **more: Any) -> Contender:
        return Contender(name, Stub(name, diary, list(tokens), rounds, fails_at), **more)

    return make


@pytest.fixture
def tokenizer(hf_tokenizer: Any) -> Tokenizer:
    return Tokenizer(hf_tokenizer)


@pytest.fixture
def questions() -> list[Prompt]:
    """Return questions of four categories, not sorted by group; one has two turns."""
    kinds = ["rag", "qa", "rag", "writing", "qa", "rag", "math"]
    return [Prompt(str(i), kind, [f"question {i}"] + ["more"] * (kind == "writing")) for i, kind in enumerate(kinds)]


@pytest.fixture
def measure(tokenizer: Tokenizer) -> Callable[..., RunResults]:
    """Run contenders on prompts: measure([stub("plain")], prompts, batches=(1, 4))."""

    def go(contenders: list[Contender], prompts: list[Prompt], max_new_tokens: int = 16, **more: Any) -> RunResults:
        options = {name: more.pop(name) for name in ("known", "on_block_run", "progress") if name in more}
        return run(lambda _: list(contenders), Plan([Suite("mine", prompts)], max_new_tokens, **more), tokenizer, **options)

    return go


@pytest.fixture
def run_foreword() -> Callable[..., Result]:
    """Run a command in this process."""
    return lambda *arguments: CliRunner().invoke(app, [str(one) for one in arguments], prog_name="foreword")
