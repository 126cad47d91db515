"""The slow truth: what plain decoding must generate, from the transformers model alone.

Each token takes one pass over the whole sequence, with no cache and no draft. Only `pick` is shared with the engine;
tests/unit/core compares it with a slow reference of its own. Grammars are those of `json_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from doubles.models import CONTEXT, END, VOCABULARY
from doubles.text import json_tokenizer
from foreword.core.choosing import History, pick
from foreword.core.sampling import Sampling
from foreword.core.sampling_table import NO_TOKEN, SamplingStages, SamplingTable
from foreword.engine.request import Request
from foreword.ops.bitmasks import words_of
from foreword.text.grammar import GrammarCompiler, GrammarSpec

_KNOWN: dict[tuple[Any, ...], list[int]] = {}  # by request: prompt and output so far; extended on demand


def truth(model: PreTrainedModel, request: Request, context: int = CONTEXT, ends: tuple[int, ...] = (END,)) -> list[int]:
    """Return the output that plain decoding must generate for a request."""
    prompt = list(request.prompt)
    limit = min(len(prompt) + request.max_new_tokens, context)
    floor = len(prompt) + request.min_new_tokens if request.min_new_tokens else 0
    held = request.stop_token_ids if floor else ()
    sequence = _KNOWN.setdefault((model, request.prompt, request.sampling, floor, ends, held, request.grammar), prompt)
    for place in range(len(request.prompt), limit):
        if place == len(sequence):
            allowed = _allowed(request.grammar, sequence[len(request.prompt) :], model.config.vocab_size)
            sequence.append(_next(model, sequence, len(request.prompt), request.sampling, floor, ends, held, allowed))
        if sequence[place] in ends and not request.ignore_eos:
            return sequence[len(request.prompt) : place + 1]
    return sequence[len(request.prompt) : limit]


def _next(
    model: Any,
    sequence: list[int],
    prompt: int,
    sampling: Sampling,
    floor: int,
    ends: tuple[int, ...],
    held: tuple[int, ...],
    allowed: Tensor | None,
) -> int:
    table = SamplingTable.empty(1, torch.tensor(ends, dtype=torch.long), model.config.vocab_size)
    table.set(0, sampling, floor, held, allowed is not None)
    logits = hf_logits(model, sequence)[-1:].unsqueeze(0)
    rows = table.at(torch.tensor([0]), (0,))
    history = _history(sequence, prompt, rows.kind, logits.shape[-1])
    return int(pick(logits, torch.tensor([[len(sequence)]]), rows, replace(history, allowed=allowed)))


GRAMMAR_COMPILER = GrammarCompiler(lambda: json_tokenizer().grammar_vocabulary(VOCABULARY, frozenset({END})))
"""Compiles grammars for the tiny models, whose tokens are those of `json_tokenizer`."""


def _allowed(grammar: GrammarSpec | None, output: list[int], vocabulary: int) -> Tensor | None:
    """Return the tokens that a grammar allows after an output, by a new matcher: [1, 1, W]. After its end all are."""
    if grammar is None:
        return None
    matcher, words = GRAMMAR_COMPILER.matcher(grammar), torch.full((1, words_of(vocabulary)), -1, dtype=torch.int32)
    for token in output:
        assert matcher.accept_token(token), "the output before follows the grammar"
        if matcher.is_terminated():
            return words.unsqueeze(0)
    matcher.fill_next_token_bitmask(words)
    return words.unsqueeze(0)


def _history(sequence: list[int], prompt: int, kind: SamplingStages, vocabulary: int) -> History:
    """Return token counts of the sequence and of its output, and its last tokens."""
    seen, generated = (
        torch.tensor(part, dtype=torch.long).bincount(minlength=vocabulary) for part in (sequence, sequence[prompt:])
    )
    padded, count = [NO_TOKEN] * kind.bad_word_length + sequence, kind.bad_word_length - 1
    last = torch.tensor(padded[-count:]).view(1, 1, -1) if kind.bad_words else None
    return History(seen.view(1, 1, -1), generated.view(1, 1, -1), last)


def full_sequence(model: PreTrainedModel, request: Request, beyond: int = 8) -> list[int]:
    """Return prompt and truth, continued by `beyond` tokens past its end: what an oracle drafts from."""
    longer = replace(request, max_new_tokens=request.max_new_tokens + beyond, ignore_eos=True, stream=None)
    return [*request.prompt, *truth(model, longer, context=2 * CONTEXT)]


@torch.no_grad()
def hf_logits(model: PreTrainedModel, sequence: Sequence[int]) -> Tensor:
    """Return the logits [n, V] of the transformers model itself."""
    return model(input_ids=torch.tensor([list(sequence)]), use_cache=False).logits[0].double()


@torch.no_grad()
def hf_hidden(model: PreTrainedModel, sequence: Sequence[int]) -> list[Tensor]:
    """Return the hidden states [n, H] after 0 .. L decoder layers of the transformers model, before its final norm."""
    kept: list[Tensor] = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, given: None if kept else kept.append(given[0][0]))]
    hooks += [layer.register_forward_hook(lambda _, __, out: kept.append(out[0])) for layer in layers]
    hf_logits(model, sequence)
    for hook in hooks:
        hook.remove()
    return kept


def hf_cache(model: PreTrainedModel, sequence: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the transformers model's keys and values of a sequence, by layer: each [heads, n, width]."""
    return _hf_cache(model, tuple(sequence))


@lru_cache(maxsize=64)  # a slot may hold the same for many rounds
@torch.no_grad()
def _hf_cache(model: PreTrainedModel, sequence: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache()  # without the config it knows no windows, so it drops nothing
    model(input_ids=torch.tensor([list(sequence)]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def hf_window(model: PreTrainedModel, layer: int) -> int | None:
    """Return how many positions a row of a layer sees in transformers. Some families set it per layer, some for all."""
    own = model.model.layers[layer % len(model.model.layers)]  # a looped model applies its layers several times
    return getattr(own.self_attn, "sliding_window", getattr(model.config, "sliding_window", None))


def forget_truth() -> None:
    """Drop all outputs computed so far, and the models they belong to."""
    _KNOWN.clear()
    _hf_cache.cache_clear()
