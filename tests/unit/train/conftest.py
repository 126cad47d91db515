"""A tiny wrapped model with a tokenizer and a chat template, and prompts for it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import foreword
from foreword.api import LLM
from foreword.text import Prompt


@pytest.fixture(scope="session")
def hf(talking: Any, hf_tokenizer: Any) -> Any:
    """Make a model. Greedy, it generates letters, which encode to the same tokens; sampled, also bytes that do not."""
    model = talking("llama", tie_word_embeddings=False)
    letters = [i for piece, i in hf_tokenizer.get_vocab().items() if piece.isascii() and len(piece) == 1]
    silent = [i for i in range(len(hf_tokenizer)) if i not in {1, *letters}]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    return model


@pytest.fixture
def make(hf: Any, hf_tokenizer: Any) -> Iterator[Callable[..., LLM]]:
    """Wrap the shared model as an LLM, one at a time: make(slots=3)."""
    made: list[LLM] = []

    def wrapped(model: Any = None, **options: Any) -> LLM:
        for one in made:
            one.close()
        made.append(foreword.wrap(model or hf, hf_tokenizer, "plain", **{"slots": 3, "max_context": 200} | options))
        return made[-1]

    yield wrapped
    for one in made:
        one.close()


@pytest.fixture
def questions() -> list[Prompt]:
    """Prompts of different lengths, some with several turns."""
    turns = ["why", "say a long thing about the sea", "hi", "what is it that you want", "no", "a b c d e f g", "x", "tell"]
    return [Prompt(f"q{i}", "prompts", [turn, "and then?", "so?"][: 1 + i % 3]) for i, turn in enumerate(turns)]
