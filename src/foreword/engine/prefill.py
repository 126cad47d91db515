"""PREFILL: prompt -> cache, in chunks, all but the last token; that one is the first root. Nothing is sampled here.

A chunk is a chain whose every row is right, so it goes through the same pass as a draft, and the drafter may read along.
Where rounds are captured, so are passes over few prompts: they are padded to one of few sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foreword.core.draft import Draft, Tree
from foreword.core.loop import Loop
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import Lanes, State, sent
from foreword.engine.graph import MOST_TEXTS, Replay, ReplayedCheck, padded_rows
from foreword.engine.request import Running
from foreword.model.model import Model

Along = Callable[[State, Draft, Scores], None]


def prefill(target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], chunk: int) -> None:
    """One pass: up to `chunk` further prompt tokens for every entering sequence."""
    parts = [running.request.prompt[running.prefilled : -1][:chunk] for running in entering]
    rows = max(map(len, parts))

    along = None if isinstance(loop, ReplayedCheck) else loop.read  # who works on the host reads behind the pass

    def read(state: State, draft: Draft) -> Scores | None:
        return _read(target, along, needs, state, draft)

    if isinstance(loop, Replay) and len(parts) <= MOST_TEXTS:
        draft = _padded(parts, padded_rows(rows, chunk), state.slots.device)
        scores = loop.prompt_pass(state, draft, read)
    else:
        draft = _padded(parts, rows, state.slots.device)
        scores = read(state, draft)
    for running, part in zip(entering, parts, strict=True):
        running.prefilled += len(part)
    if scores is not None and needs.prompt == "last":
        _read_last(target, loop, needs, state, entering, draft, scores)
    elif scores is not None:
        loop.read(state, draft, scores)


def _padded(parts: list[tuple[int, ...]], rows: int, device: torch.device) -> Draft:
    """Chains of equal length. No row of a text sees the padding behind it, which repeats a token that the text has."""
    tokens = sent([part + part[-1:] * (rows - len(part)) for part in parts], device)
    return Draft(tokens, Tree.chain(rows, device), sent([len(part) for part in parts], device))


def _read(target: Model, along: Along | None, needs: Needs, state: State, draft: Draft) -> Scores | None:
    """The pass itself, which may be captured: rows into the cache, and the drafter reads `along`, or gets what this gives
    behind it. So do drafters that want the last row only: which one that is, the host knows."""
    reads_all, last = needs.prompt == "all", needs.prompt == "last"
    asked = Needs(hidden=needs.hidden or last, taps=needs.taps) if needs.prompt != "none" else Needs()
    scores = target.score(state.lanes, draft, asked, logits="all" if reads_all and needs.logits else "none")
    target.cache.advance(state.lanes, draft.size)
    if reads_all and along is not None:
        along(state, draft, scores)
    return scores if last or (reads_all and along is None) else None


def _read_last(
    target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], draft: Draft, scores: Scores
) -> None:
    """Hand over the row before the root, for the sequences whose prompt ends in this chunk."""
    ended = [i for i, running in enumerate(entering) if running.ready]
    if not ended:
        return
    pick = sent(ended, draft.size.device)
    last = (draft.size[pick] - 1).view(-1, 1)

    def at_last(values: torch.Tensor) -> torch.Tensor:
        return values[pick].gather(1, last.unsqueeze(-1).expand(-1, 1, values.shape[-1]))

    hidden = at_last(scores.require_hidden())
    logits = target.head(target.norm(hidden)) if needs.logits else None
    taps = {layer: at_last(tap) for layer, tap in scores.taps.items()}
    one = Draft(draft.tokens[pick].gather(1, last), Tree.chain(1, last.device), torch.ones_like(pick))
    lanes = Lanes(state.slots[pick], tuple(state.lanes.ids[i] for i in ended), state.lanes.span + draft.nodes)
    loop.read(state.at(lanes), one, Scores(logits, hidden if needs.hidden else None, taps))
