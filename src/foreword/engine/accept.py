"""ACCEPT: Scores -> Accepted. The one lossless rule, for any tree, in tensors.

At every row the target's own token is picked. A row matches if its token is the pick at its parent. A row is accepted if all
its ancestors match, and the deepest such row wins. The picks along that path are emitted: exactly what the target would
generate alone, whatever was drafted. An end token inside the draft cuts the path there. A NaN on the path decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.choosing import History, log_chances, pick
from foreword.core.draft import Draft
from foreword.core.sampling_table import NO_TOKEN
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State
from foreword.ops.rounds import decide


def accept(state: State, draft: Draft, scores: Scores, depth: int) -> tuple[Accepted, Emission]:
    """Decide what a round emits. `depth` bounds the tree, so that a path has `depth + 1` places."""
    logits = scores.require_logits()
    kind, places = state.sampling.kind, min(draft.nodes, depth + 1)
    choice = _choices(state, draft, logits)  # [b, N]
    # A NaN beats every number in a maximum, so the chosen logit shows it, unless it was dropped: then look again.
    peak = logits.amax(-1, keepdim=True) if kind.drops else logits
    accepted, emission = settle(state, draft, choice, peak, places)
    return accepted, replace(emission, **_logprobs(logits, accepted, emission.tokens, kind.logprobs))


def _choices(state: State, draft: Draft, logits: Tensor) -> Tensor:
    """[b, N]: the target's own token after each row."""
    kind, position = state.sampling.kind, draft.tree.depth
    if not kind.is_greedy:
        position = state.length.unsqueeze(1) + position + 1
    return pick(logits, position, state.sampling, history(state, draft))


def settle(state: State, draft: Draft, choice: Tensor, peak: Tensor, places: int) -> tuple[Accepted, Emission]:
    """What a round decides if the target chose `choice` [b, N]. A NaN in `peak` [b, N, V or 1] decides nothing."""
    emission = Emission.in_a_block(choice.shape[0], places, choice.device)
    path, last = decide(state, draft, choice, peak, emission)
    return Accepted(path, emission.count, last), emission


def history(state: State, draft: Draft) -> History:
    """What comes before the place that each row decides, as far as the round's stages need it."""
    kind = state.sampling.kind
    return History(
        seen=count_seen(state, draft, state.seen) if kind.repetition else None,
        generated=count_seen(state, draft, state.table.columns["generated"]) if kind.generated else None,
        last=last_tokens(state, draft, kind.bad_word_length - 1) if kind.bad_words else None,
    )


def count_seen(state: State, draft: Draft, counts: Tensor) -> Tensor:
    """[b, N, V]: how often each token occurs before the place that a row decides, by the counts [B, V] of committed tokens,
    the root among them."""
    seen = counts[state.slots].unsqueeze(1).repeat(1, draft.nodes, 1)
    on_way = draft.tree.ancestors.expand(seen.shape[0], -1, -1).clone()
    on_way[:, :, 0] = False
    return seen.scatter_add_(2, draft.tokens.unsqueeze(1).expand_as(on_way), on_way.to(seen.dtype))


def last_tokens(state: State, draft: Draft, count: int) -> Tensor:
    """[b, N, count]: the last tokens before the place that each row decides: the row's own and its ancestors', then those
    that are committed."""
    parent = draft.tree.parent.expand_as(draft.tokens)
    committed = state.tokens[state.slots]
    depth = draft.tree.depth.expand_as(parent)
    row, found = torch.arange(draft.nodes, device=parent.device).expand_as(parent), []
    for back in range(count):
        place = state.length.unsqueeze(1) + depth - back
        earlier = committed.gather(1, place.clamp(0, committed.shape[1] - 1)).where(place >= 0, NO_TOKEN)
        found.append(draft.tokens.gather(1, row).where(depth >= back, earlier))
        row = parent.gather(1, row)
    return torch.stack(found[::-1], -1)


def _logprobs(logits: Tensor, accepted: Accepted, tokens: Tensor, top: int) -> dict[str, Tensor]:
    if top < 0:
        return {}
    chosen, likely, values = log_chances(accepted.along(logits), tokens, top)
    return {"logprobs": chosen, "top_tokens": likely, "top_logprobs": values}
