"""ACCEPT: Scores -> Accepted. The one lossless rule, for any tree, in tensors.

At every row the target's own token is picked. A row matches if its token is the pick at its parent; it lives if all its
ancestors match; the deepest living row wins. What is emitted are the picks along that path: the text that the target
would have written alone, whoever drafted. A stop inside the draft cuts the path there; a NaN on the path decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foreword.core.draft import Draft
from foreword.core.sampling import pick, widened
from foreword.core.scores import Accepted, Emission, Scores
from foreword.core.state import State


def accept(state: State, draft: Draft, scores: Scores, depth: int) -> tuple[Accepted, Emission]:
    """`depth` bounds the tree, so that a path has `depth + 1` places."""
    logits = scores.require_logits()
    kind, places = state.sampling.kind, min(draft.nodes, depth + 1)
    choice = _choices(state, draft, logits)  # [b, N]
    # A NaN beats every number in a maximum, so the chosen logit shows it, unless a filter dropped it: then look again.
    peak = logits.amax(-1, keepdim=True) if kind.filters else logits
    accepted, emission = (_settle_by_kernel if choice.is_cuda else settle)(state, draft, choice, peak, places)
    return accepted, replace(emission, **_logprobs(logits, accepted, emission.tokens, kind.logprobs))


def _choices(state: State, draft: Draft, logits: Tensor) -> Tensor:
    kind, position = state.sampling.kind, draft.tree.depth
    if not kind.is_greedy:
        position = state.length.unsqueeze(1) + position + 1
    return pick(logits, position, state.sampling, count_seen(state, draft) if kind.penalties else None)


def settle(state: State, draft: Draft, choice: Tensor, peak: Tensor, places: int) -> tuple[Accepted, Emission]:
    """What stands of the draft where the target chose `choice` [b, N]; a NaN in `peak` [b, N, V or 1] decides nothing."""
    path, count = longest_path(draft, choice, places)
    tokens = choice.gather(1, path)  # [b, D+1]
    count, ended = cut(state, tokens, count)
    broken = _broken(peak, choice, path, count)
    count = count.where(~broken, 0)
    last = (count - 1).clamp(min=0).unsqueeze(1)
    accepted = Accepted(path, count, tokens.gather(1, last).squeeze(1))
    return accepted, Emission(tokens, count, (draft.size - 1) * state.alive, ended & ~broken, broken)


def _settle_by_kernel(state: State, draft: Draft, choice: Tensor, peak: Tensor, places: int) -> tuple[Accepted, Emission]:
    from foreword.kernels.settle import decided  # noqa: PLC0415  Triton is there only where CUDA is

    tree = draft.tree.parent, *draft.tree.lineage
    emission = Emission.in_a_block(choice.shape[0], places, choice.device)
    path, last = decided(state, state.table.ends, choice, draft.tokens, tree, draft.size, peak, emission)
    return Accepted(path, emission.count, last), emission


def longest_path(draft: Draft, choice: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The way from the root to the deepest row that the choices agree with: rows [b, places], and how many count."""
    if draft.nodes == 1:  # a root alone: nothing was guessed
        return torch.zeros_like(choice), torch.ones_like(choice[:, 0])
    tree, rows = draft.tree, torch.arange(draft.nodes, device=choice.device)
    parent = tree.parent.expand(choice.shape[0], -1)
    matches = ((draft.tokens == choice.gather(1, parent)) & draft.counts) | (rows == 0)
    lives = (matches.unsqueeze(1) | ~tree.ancestors).all(-1)
    depth = tree.depth.expand_as(choice)
    best = depth.where(lives, -1).argmax(1)  # [b]
    ancestors = tree.ancestors.expand(choice.shape[0], -1, -1)
    on_path = ancestors.gather(1, best.view(-1, 1, 1).expand(-1, 1, draft.nodes)).squeeze(1)
    # Rows off the path are written to one place too many, which is then cut off.
    path = torch.zeros(choice.shape[0], places + 1, dtype=torch.long, device=choice.device)
    path.scatter_(1, depth.where(on_path, places).clamp(max=places), rows.expand_as(choice))
    return path[:, :places], on_path.sum(1)


def cut(state: State, tokens: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """How many of a round's tokens stand, and whether the text ends with them: end token, length limit, frozen slot."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    is_end = torch.isin(tokens, state.table.ends) & state.heeds_ends[state.slots].unsqueeze(1)
    before_end = torch.where(is_end, order, tokens.shape[1]).amin(1) + 1
    room = state.limits[state.slots] - state.length - 1
    count = torch.minimum(torch.minimum(count, before_end), room)
    ended = (count == before_end) | (count == room)
    alive = state.alive
    return count.where(alive, 0), ended & alive


def count_seen(state: State, draft: Draft) -> Tensor:
    """[b, N, V]: how often each token stands before the place that a row decides; the root is in `state.seen` already."""
    seen = state.seen[state.slots].unsqueeze(1).repeat(1, draft.nodes, 1)
    on_way = draft.tree.ancestors.expand(seen.shape[0], -1, -1).clone()
    on_way[:, :, 0] = False
    return seen.scatter_add_(2, draft.tokens.unsqueeze(1).expand_as(on_way), on_way.to(seen.dtype))


def _broken(peak: Tensor, choice: Tensor, path: Tensor, count: Tensor) -> Tensor:
    shown = peak.gather(2, choice.clamp(max=peak.shape[2] - 1).unsqueeze(2)).squeeze(2)
    kept = torch.arange(path.shape[1], device=path.device) < count.unsqueeze(1)
    return (shown.gather(1, path).isnan() & kept).any(1)


def _logprobs(logits: Tensor, accepted: Accepted, tokens: Tensor, top: int) -> dict[str, Tensor]:
    if top < 0:
        return {}
    rows = widened(accepted.along(logits)).log_softmax(-1)
    best = rows.topk(min(top, rows.shape[-1]), dim=-1)
    chosen = rows.gather(2, tokens.unsqueeze(-1)).squeeze(-1)
    return {"logprobs": chosen, "top_tokens": best.indices, "top_logprobs": best.values}
