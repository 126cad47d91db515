"""PREFILL: prompt -> cache, in chunks, all but the last token; that one is the first root. Nothing is sampled here.

A chunk is a chain whose every row is right, so it goes through the same pass as a draft, and the drafter may read along: all
of its rows, or the last. Where rounds are captured, so are passes over few prompts: they are padded to one of few sizes, and
prompts of one size are read together. A prompt whose own log-probabilities are asked for is read alone.
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
from foreword.engine.emit import told_logprobs
from foreword.engine.graph import MOST_TEXTS, padded_rows, reach
from foreword.engine.request import Running
from foreword.model.model import Model
from foreword.ops.sending import sent

LOGPROB_ROWS = 128  # of which the head's answers, as wide as the vocabulary, are in memory at a time
MOST_CAPTURED = 64  # prompts: of more, the device has work enough in one pass while the host launches it


def parted(entering: list[Running], loop: Loop, chunk: int, together: bool) -> list[list[Running]]:
    """Who is read in one pass: one prompt, or if several may be read `together`, all of them, or where passes are captured
    those that go through the same one."""
    if not together:
        return [[running] for running in entering]
    asking = [running for running in entering if running.request.prompt_logprobs is not None]
    if asking:
        others = [running for running in entering if running.request.prompt_logprobs is None]
        return [*([running] for running in asking), *parted(others, loop, chunk, together)]
    if not loop.captured or len(entering) > MOST_CAPTURED:
        return [entering] if entering else []

    def kind(running: Running) -> tuple[int, int]:
        return reach(running.prefilled), padded_rows(min(running.rows - running.prefilled, chunk), chunk)

    alike = [list(group) for _, group in groupby(sorted(entering, key=kind), kind)]
    return [group[first : first + MOST_TEXTS] for group in alike for first in range(0, len(group), MOST_TEXTS)]


def prefill(target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], chunk: int) -> None:
    """One pass: up to `chunk` further prompt tokens for every entering sequence."""
    parts = [running.request.prompt[running.prefilled : -1][:chunk] for running in entering]
    rows = max(map(len, parts))
    scores: Scores | None

    def read(state: State, draft: Draft) -> Scores | None:
        scores = _passed(target, needs, state, draft)
        if loop.reads_after:
            return scores
        _hand_over(target, loop, needs, state, draft, scores)
        return None  # a captured pass keeps none of its rows

    if entering[0].request.prompt_logprobs is not None:
        draft = _padded(parts, rows, state.slots.device)
        scores = _passed(target, needs, state, draft, hidden=True)
        _tell_logprobs(target, entering[0], scores.require_hidden())
    elif loop.captured and len(parts) <= MOST_TEXTS:
        draft = _padded(parts, padded_rows(rows, chunk), state.slots.device)
        scores = loop.prompt_pass(state, draft, read)
    else:
        draft = _padded(parts, rows, state.slots.device)
        scores = read(state, draft)
    if scores is not None:
        _hand_over(target, loop, needs, state, draft, scores)
    for running, part in zip(entering, parts, strict=True):
        running.prefilled += len(part)


def _padded(parts: list[tuple[int, ...]], rows: int, device: torch.device) -> Draft:
    """Chains of equal length. No row of a text sees the padding behind it, which repeats a token that the text has."""
    tokens = sent([part + part[-1:] * (rows - len(part)) for part in parts], device)
    return Draft(tokens, Tree.chain(rows, device), sent([len(part) for part in parts], device))


def _passed(target: Model, needs: Needs, state: State, draft: Draft, hidden: bool = False) -> Scores:
    """Rows into the cache, and what they look like to a drafter that reads them, or `hidden` to whoever asks."""
    reads_all, last = needs.prompt == "all", needs.prompt == "last"
    asked = Needs(hidden=needs.hidden or last or hidden, taps=needs.taps) if needs.prompt != "none" else Needs(hidden=hidden)
    scores = target.score(state.batch, draft, asked, logits="all" if reads_all and needs.logits else "none")
    target.cache.advance(state.batch, draft.size)
    return scores


def _tell_logprobs(target: Model, running: Running, hidden: Tensor) -> None:
    """Each row of a chunk [1, n, H] says how likely the token after it is."""
    request, first = running.request, running.prefilled + 1
    assert request.prompt_logprobs is not None
    for rows in hidden.split(LOGPROB_ROWS, dim=1):
        tokens = list(request.prompt[first : first + rows.shape[1]])
        found = log_chances(target.head(target.norm(rows)), sent([tuple(tokens)], rows.device), request.prompt_logprobs)
        running.prompt_logprobs += told_logprobs(request, tokens, *(part[0].tolist() for part in found))
        first += rows.shape[1]


def _hand_over(target: Model, loop: Loop, needs: Needs, state: State, draft: Draft, scores: Scores) -> None:
    if needs.prompt == "all":
        loop.read(state, draft, scores)
    elif needs.prompt == "last":
        loop.read(*_last_row(target, needs, state, draft, scores))


def _last_row(target: Model, needs: Needs, state: State, draft: Draft, scores: Scores) -> tuple[State, Draft, Scores]:
    """The same of a chunk's last row alone."""
    last = (draft.size - 1).view(-1, 1)

    def at_last(values: Tensor) -> Tensor:
        return values.gather(1, last.unsqueeze(-1).expand(-1, 1, values.shape[-1]))

    hidden = at_last(scores.require_hidden())
    logits = target.head(target.norm(hidden)) if needs.logits else None
    taps = {layer: at_last(tap) for layer, tap in scores.taps.items()}
    one = Draft(draft.tokens.gather(1, last), Tree.chain(1, last.device), torch.ones_like(draft.size))
    batch = replace(state.batch, span=state.batch.span + draft.nodes)
    return state.at(batch), one, Scores(logits, hidden if needs.hidden else None, taps)
