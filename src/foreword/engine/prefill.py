"""PREFILL: prompt -> cache, in chunks, all but the last token; that one is the first root. Nothing is sampled here.

A chunk is a chain whose every row is right, so it goes through the same pass as a draft, and the drafter may read along.
"""

from __future__ import annotations

import torch

from foreword.core.draft import Draft, Tree
from foreword.core.loop import Loop
from foreword.core.needs import Needs
from foreword.core.scores import Scores
from foreword.core.state import Lanes, State
from foreword.engine.request import Running
from foreword.model.model import Model


def prefill(target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], chunk: int) -> None:
    """One pass: up to `chunk` further prompt tokens for every entering sequence."""
    lanes = state.lanes
    parts = [running.request.prompt[running.prefilled : -1][:chunk] for running in entering]
    rows = max(map(len, parts))
    padded = [part + (0,) * (rows - len(part)) for part in parts]
    size = torch.tensor([len(part) for part in parts], device=lanes.slots.device)
    tokens = torch.tensor(padded, device=lanes.slots.device)
    draft = Draft(tokens, Tree.chain(rows, lanes.slots.device), size)
    reads_all = needs.prompt == "all"
    last = needs.prompt == "last"
    asked = Needs(hidden=needs.hidden or last, taps=needs.taps) if needs.prompt != "none" else Needs()
    scores = target.score(lanes, draft, asked, logits="all" if reads_all and needs.logits else "none")
    target.cache.advance(lanes, size)
    for running, part in zip(entering, parts, strict=True):
        running.prefilled += len(part)
    if reads_all:
        loop.read(state, draft, scores)
    elif last:
        _read_last(target, loop, needs, state, entering, draft, scores)


def _read_last(
    target: Model, loop: Loop, needs: Needs, state: State, entering: list[Running], draft: Draft, scores: Scores
) -> None:
    """Hand over the row before the root, for the sequences whose prompt ends in this chunk."""
    ended = [i for i, running in enumerate(entering) if running.ready]
    if not ended:
        return
    pick = torch.tensor(ended, device=draft.size.device)
    last = (draft.size[pick] - 1).view(-1, 1)

    def at_last(values: torch.Tensor) -> torch.Tensor:
        return values[pick].gather(1, last.unsqueeze(-1).expand(-1, 1, values.shape[-1]))

    hidden = at_last(scores.require_hidden())
    logits = target.head(target.norm(hidden)) if needs.logits else None
    taps = {layer: at_last(tap) for layer, tap in scores.taps.items()}
    one = Draft(draft.tokens[pick].gather(1, last), Tree.chain(1, last.device), torch.ones_like(pick))
    lanes = Lanes(state.slots[pick], tuple(state.lanes.ids[i] for i in ended), state.lanes.span + draft.nodes)
    loop.read(state.at(lanes), one, Scores(logits, hidden if needs.hidden else None, taps))
