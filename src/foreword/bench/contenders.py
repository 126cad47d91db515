"""Who is timed: our methods, each with its own cache on shared weights, and other people's decoding on stock weights.

A contender writes the answer to a prompt and says which tokens it wrote; the clock is the benchmark's, not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foreword.api import LLM
from foreword.errors import InputError
from foreword.methods.wanted import Wanted
from foreword.model.loading import load_stock
from foreword.model.model import Model
from foreword.text import Message


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    rounds: int
    prefill_s: float | None = None  # where the contender can tell


@dataclass(frozen=True)
class Contender:
    name: str
    write: Callable[[list[Message], int], Answer]


def contender(llm: LLM, method: str, max_context: int | None = None, **options: Any) -> Contender:
    """A method, or NAME=FOLDER for a trained drafter, on the weights of `llm`: one text at a time, greedy."""
    own = LLM(
        Model(llm.model.hf, llm.model.name, llm.model.curve),
        llm.tokenizer,
        Wanted.of(method, **options),
        slots=1,
        max_context=max_context,
    )

    def write(prompt: list[Message], max_new_tokens: int) -> Answer:
        result = own.generate(prompt, max_new_tokens=max_new_tokens)
        return Answer(result.tokens, result.stats.rounds, result.stats.prefill_s)

    return Contender(method, write)


def baseline(name: str, llm: LLM, folder: Path) -> Contender:
    """Somebody else's decoding of the same model: `hf` is `generate` of transformers, `hf_lookup` its prompt lookup."""
    options = {"hf": {}, "hf_lookup": {"prompt_lookup_num_tokens": 10}}
    if name not in options:
        raise InputError(f"no baseline is called {name!r}; there are: {', '.join(options)}")
    model = load_stock(folder, llm.model.device, llm.model.dtype)
    passes: list[None] = []  # the first reads the prompt and decides a token, so each of them counts as a round
    model.register_forward_hook(lambda *_: passes.append(None))

    @torch.inference_mode()
    def write(prompt: list[Message], max_new_tokens: int) -> Answer:
        passes.clear()
        ids = torch.tensor([llm.tokenizer.encode(prompt)], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            **options[name],
        )
        tokens = out[0, ids.shape[1] :].tolist()
        return Answer(tokens, len(passes))

    return Contender(name, write)
