"""Who is timed: our methods, each with its own cache on shared weights, and other people's decoding on stock weights.

A contender writes the answers to prompts, as many side by side as it has slots, and says which tokens it wrote; the clock is
the benchmark's, not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foreword.api import LLM
from foreword.bench.grow import grow
from foreword.bench.warm import capture_rounds
from foreword.errors import InputError
from foreword.methods.wanted import Wanted
from foreword.model.loading import load_stock
from foreword.model.model import Model
from foreword.text import Message, Prompt

Asked = str | list[Message]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    rounds: int
    prefill_s: float | None = None  # where the contender can tell


@dataclass(frozen=True)
class Contender:
    name: str
    write: Callable[[Sequence[Asked], int], list[Answer]]
    capture: Callable[[Sequence[Asked], int], None] = lambda *_: None
    """Prepare for answers to these prompts, so that nothing is captured while the clock runs."""
    close: Callable[[], None] = lambda: None


def contender(
    llm: LLM,
    method: str,
    max_context: int | None = None,
    slots: int = 1,
    graph: bool = True,
    **options: Any,
) -> Contender:
    """A method, or NAME=FOLDER for a trained drafter, on the weights of `llm`: greedy, `slots` texts side by side."""
    model = llm.model
    shared = Model(model.hf, model.name, model.curve, model.grown)
    own = LLM(shared, llm.tokenizer, Wanted.of(method, **options), slots, max_context, graph)

    def write(prompts: Sequence[Asked], max_new_tokens: int) -> list[Answer]:
        results = own.generate(list(prompts), max_new_tokens=max_new_tokens)
        return [Answer(result.tokens, result.stats.rounds, result.stats.prefill_s) for result in results]

    def capture(prompts: Sequence[Asked], max_new_tokens: int) -> None:
        lengths = [len(llm.tokenizer.encode(prompt)) for prompt in prompts]
        capture_rounds(own.engine, min(lengths), max(lengths) + max_new_tokens)

    return Contender(method, write, capture, own.close)


def context_for(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int) -> int:
    """Tokens that the longest answer may reach, its prompt included: what a cache must hold, and not more."""
    longest = max(len(llm.tokenizer.encode(prompt.first())) for prompt in prompts)
    return min(longest + max_new_tokens + 1, llm.model.max_context)


def baseline(name: str, llm: LLM, folder: Path) -> Contender:
    """Somebody else's decoding of the same model: `hf` is `generate` of transformers, `hf_lookup` its prompt lookup.

    One text at a time. Where `llm` is grown, so is what they run on.
    """
    options = {"hf": {}, "hf_lookup": {"prompt_lookup_num_tokens": 10}}
    if name not in options:
        raise InputError(f"no baseline is called {name!r}; there are: {', '.join(options)}")
    model = load_stock(folder, llm.model.device, llm.model.dtype)
    if llm.model.grown is not None:
        model = grow(model, llm.model.grown.times)
    passes: list[None] = []  # the first reads the prompt and decides a token, so each of them counts as a round
    model.register_forward_hook(lambda *_: passes.append(None))

    @torch.inference_mode()
    def answer(prompt: Asked, max_new_tokens: int) -> Answer:
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

    def write(prompts: Sequence[Asked], max_new_tokens: int) -> list[Answer]:
        return [answer(prompt, max_new_tokens) for prompt in prompts]

    return Contender(name, write)
