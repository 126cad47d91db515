"""PREFILL: prompt -> cache, in chunks, all but the last token, which becomes the first root. Nothing is sampled here.

A chunk is a chain whose rows are all correct, so it goes through the same pass as a draft. The drafter may read its rows
too, all of them or the last. If rounds are captured, so are passes over few prompts: they are padded to one of a few sizes,
and prompts of one size are read together. A prompt whose own log-probabilities are requested is read alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from foreword.core.choosing import log_chances
from foreword.core.draft import Draft, Tree
from foreword.core.loop import Loop
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import State
from foreword.engine.emit import logprob_entries
from foreword.engine.graph import MOST_PROMPTS, padded_rows, reach
from foreword.engine.request import Running
from foreword.model.model import Model
from foreword.ops.sending import sent

LOGPROB_ROWS = 128  # rows whose logits, as wide as the vocabulary, are in memory at a time
MOST_CAPTURED = 64  # prompts; with more, an eager pass has enough work to keep the device busy while the host launches it


def prompt_groups(entering: list[Running], loop: Loop, chunk: int, joins_prompts: bool) -> list[list[Running]]:
    """Group the requests whose prompts are read in one pass. Without `joins_prompts`, each is alone. With it, all are one
    group; if passes are captured, those that replay the same graph are a group."""
    if not joins_prompts:
        return [[running] for running in entering]
    with_logprobs = [running for running in entering if running.request.prompt_logprobs is not None]
    if with_logprobs:
        others = [running for running in entering if running.request.prompt_logprobs is None]
        return [*([running] for running in with_logprobs), *prompt_groups(others, loop, chunk, joins_prompts)]
    if not loop.captured or len(entering) > MOST_CAPTURED:
        return [entering] if entering else []

    def shape(running: Running) -> tuple[int, int]:
        return reach(running.prefilled), padded_rows(min(running.rows - running.prefilled, chunk), chunk)

    alike = [list(group) for _, group in groupby(sorted(entering, key=shape), shape)]
    return [group[first : first + MOST_PROMPTS] for group in alike for first in range(0, len(group), MOST_PROMPTS)]


def prefill(target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], chunk: int) -> None:
    """Run one pass: up to `chunk` further prompt tokens for every entering sequence."""
    chunks = [running.request.prompt[running.prefilled : -1][:chunk] for running in entering]
    rows = max(map(len, chunks))
    scores: Scores | None

    def read(state: State, draft: Draft) -> Scores | None:
        scores = _score(target, needs, state, draft)
        if loop.reads_after:
            return scores
        _show_drafter(target, loop, needs, state, draft, scores)
        return None  # a captured pass keeps none of its rows

    if entering[0].request.prompt_logprobs is not None:
        draft = _padded(chunks, rows, state.slots.device)
        scores = _score(target, needs, state, draft, hidden=True)
        _add_prompt_logprobs(target, entering[0], scores.require_hidden())
    elif loop.captured and len(chunks) <= MOST_PROMPTS:
        draft = _padded(chunks, padded_rows(rows, chunk), state.slots.device)
        scores = loop.prompt_pass(state, draft, read)
    else:
        draft = _padded(chunks, rows, state.slots.device)
        scores = read(state, draft)
    if scores is not None:
        _show_drafter(target, loop, needs, state, draft, scores)
    for running, tokens in zip(entering, chunks, strict=True):
        running.prefilled += len(tokens)


def _padded(chunks: list[tuple[int, ...]], rows: int, device: torch.device) -> Draft:
    """Make chains of equal length. No row of a sequence attends to the padding after it, which repeats its last token."""
    tokens = sent([chunk + chunk[-1:] * (rows - len(chunk)) for chunk in chunks], device)
    return Draft(tokens, Tree.chain(rows, device), sent([len(chunk) for chunk in chunks], device))


def _score(target: Model, needs: Needs, state: State, draft: Draft, hidden: bool = False) -> Scores:
    """Write the rows to the cache, and return the scores that the drafter needs; with `hidden`, hidden states in any
    case."""
    reads_all, last = needs.prompt == "all", needs.prompt == "last"
    asked = Needs(hidden=needs.hidden or last or hidden, taps=needs.taps) if needs.prompt != "none" else Needs(hidden=hidden)
    scores = target.score(state.batch, draft, asked, logits="all" if reads_all and needs.logits else "none")
    target.cache.advance(state.batch, draft.size)
    return scores


def _add_prompt_logprobs(target: Model, running: Running, hidden: Tensor) -> None:
    """Add the log-probabilities of prompt tokens to a request. Each row of a chunk [1, n, H] scores the token after it."""
    request, first = running.request, running.prefilled + 1
    assert request.prompt_logprobs is not None
    for rows in hidden.split(LOGPROB_ROWS, dim=1):
        tokens = list(request.prompt[first : first + rows.shape[1]])
        found = log_chances(target.head(target.norm(rows)), sent([tuple(tokens)], rows.device), request.prompt_logprobs)
        running.prompt_logprobs += logprob_entries(request, tokens, *(values[0].tolist() for values in found))
        first += rows.shape[1]


def _show_drafter(target: Model, loop: Loop, needs: Needs, state: State, draft: Draft, scores: Scores) -> None:
    """Let the drafter read the rows of a chunk that it needs."""
    if needs.prompt == "all":
        loop.read(state, draft, scores)
    elif needs.prompt == "last":
        loop.read(*_last_row(target, needs, state, draft, scores))


def _last_row(target: Model, needs: Needs, state: State, draft: Draft, scores: Scores) -> tuple[State, Draft, Scores]:
    """Return state, draft and scores of a chunk's last row alone."""
    last = (draft.size - 1).view(-1, 1)

    def at_last(values: Tensor) -> Tensor:
        return values.gather(1, last.unsqueeze(-1).expand(-1, 1, values.shape[-1]))

    hidden = at_last(scores.require_hidden())
    logits = target.head(target.norm(hidden)) if needs.logits else None
    taps = {layer: at_last(tap) for layer, tap in scores.taps.items()}
    one = Draft(draft.tokens.gather(1, last), Tree.chain(1, last.device), torch.ones_like(draft.size))
    batch = replace(state.batch, span=state.batch.span + draft.nodes)
    return state.at(batch), one, Scores(logits, hidden if needs.hidden else None, taps)
