"""ACCEPT: Scores -> Accepted. The only file that decides which draft tokens are kept, by one lossless rule for any tree.

`model/model.py` computes the scores, and `engine/lockstep.py` calls both. The target picks its own token at every row. A row
matches if its token is the pick at its parent. A row is accepted if it and all its ancestors match, and the deepest accepted
row wins. The picks along that path are emitted: exactly what the target would generate alone, whatever was drafted. An end
token inside the draft cuts the path. After a NaN on the path the round decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.choosing import History, chances_after, log_chances, pick
from foreword.core.draft import PREDICTION, Draft
from foreword.core.sampling_table import NO_TOKEN
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State
from foreword.ops.rounds import decide


def accept(
    state: State, draft: Draft, scores: Scores, depth: int, choice: Tensor | None = None
) -> tuple[Accepted, Emission]:
    """Decide what a round emits. `depth` bounds the depth of the tree, so a path has at most `depth + 1` rows. `choice`
    [b, N]: the target's own token after each row, if it is known already."""
    logits = scores.require_logits()
    kind, places = state.sampling.kind, min(draft.nodes, depth + 1)
    choice = _choices(state, draft, logits) if choice is None else choice
    # A NaN beats every number in a maximum, so the chosen logit shows it. A filter may have dropped it: then look again.
    peak = logits.amax(-1, keepdim=True) if kind.drops else logits
    accepted, emission = settle(state, draft, choice, peak, places)
    more = _logprobs(logits, accepted, emission.tokens, kind.logprobs)
    if kind.predictions:
        more |= _predicted(draft, accepted)
    if kind.traces:
        more |= _trace(draft, logits, accepted)
    return accepted, replace(emission, **more)


def _choices(state: State, draft: Draft, logits: Tensor) -> Tensor:
    """Pick the target's own token after each row: [b, N]."""
    kind, position = state.sampling.kind, draft.tree.depth
    if not kind.is_greedy:
        position = state.length.unsqueeze(1) + position + 1
    return pick(logits, position, state.sampling, history(state, draft))


def settle(state: State, draft: Draft, choice: Tensor, peak: Tensor, places: int) -> tuple[Accepted, Emission]:
    """Accept the rows that agree with the target's `choice` [b, N]. If `peak` [b, N, V or 1] has a NaN on the path, decide
    nothing."""
    emission = Emission.in_a_block(choice.shape[0], places, choice.device)
    path, last = decide(state, draft, choice, peak, emission)
    return Accepted(path, emission.count, last), emission


def history(state: State, draft: Draft) -> History:
    """Return what precedes the token that each row decides, as far as the round's stages need it."""
    kind = state.sampling.kind
    return History(
        seen=count_seen(state, draft, state.seen) if kind.repetition else None,
        generated=count_seen(state, draft, state.table.columns["generated"]) if kind.generated else None,
        last=last_tokens(state, draft, kind.bad_word_length - 1) if kind.bad_words else None,
        allowed=draft.allowed if kind.grammar else None,
    )


def count_seen(state: State, draft: Draft, counts: Tensor) -> Tensor:
    """Count how often each token occurs before the token that a row decides: [b, N, V].

    counts [B, V]: the counts of the committed tokens, root included.
    """
    seen = counts[state.slots].unsqueeze(1).repeat(1, draft.nodes, 1)
    on_way = draft.tree.ancestors.expand(seen.shape[0], -1, -1).clone()
    on_way[:, :, 0] = False
    return seen.scatter_add_(2, draft.tokens.unsqueeze(1).expand_as(on_way), on_way.to(seen.dtype))


def last_tokens(state: State, draft: Draft, count: int) -> Tensor:
    """Return the last tokens before the one that each row decides, [b, N, count]: committed tokens, then those of the row's
    ancestors and its own."""
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


def _predicted(draft: Draft, accepted: Accepted) -> dict[str, Tensor]:
    """Return how many accepted draft tokens came from the predictions of their requests. A chain begins at the root, so they
    are the first ones of the round."""
    of_path = draft.origins.gather(1, accepted.path) == PREDICTION
    return {"predicted": (of_path & accepted.kept).sum(1)}


def _trace(draft: Draft, logits: Tensor, accepted: Accepted) -> dict[str, Tensor]:
    """Return what `RoundTrace` shows of a round."""
    parent = draft.tree.parent.expand_as(draft.tokens)
    return {
        "nodes": torch.stack([draft.tokens, parent, draft.origins], -1),
        "chances": chances_after(logits, parent, draft.tokens),
        "path": accepted.path,
    }
