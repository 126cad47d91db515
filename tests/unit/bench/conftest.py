"""Contenders and prompts for the measuring loop, and timings whose every figure is known."""

from collections.abc import Callable, Sequence

import pytest

from foreword.bench.contenders import Answer, Contender
from foreword.text import Prompt


class Stub:
    """Writes a given answer, and tells a common diary when it was asked."""

    def __init__(self, name: str, diary: list[tuple[str, str, int]], tokens: list[int], rounds: int) -> None:
        self.name, self.diary, self.answer = name, diary, Answer(tokens, rounds, 0.25)

    def __call__(self, prompts: Sequence[str], max_new_tokens: int) -> list[Answer]:
        self.diary += [(self.name, prompt, max_new_tokens) for prompt in prompts]
        return [self.answer] * len(prompts)


@pytest.fixture
def diary() -> list[tuple[str, str, int]]:
    return []


@pytest.fixture
def stub(diary: list[tuple[str, str, int]]) -> Callable[..., Contender]:
    """A contender that answers at once: stub("plain", [1, 2, 3], rounds=3)."""
    return lambda name, tokens=(1, 2, 3), rounds=3: Contender(name, Stub(name, diary, list(tokens), rounds))


@pytest.fixture
def questions() -> list[Prompt]:
    """Three kinds of question, not in the order of their groups."""
    kinds = ["rag", "qa", "rag", "writing", "qa", "rag", "math"]
    return [Prompt(str(i), kind, [f"question {i}"] + ["more"] * (kind == "writing")) for i, kind in enumerate(kinds)]
